#!/usr/bin/env python3
"""Compares the speed of builds of hybrid_train on the CPU: compare_trainers.py OLD NEW... [--runs N] [--threads LIST].

The programs run in turn, so that whatever else the machine does meets all of them.  Each program's least time of all
runs counts: CPU time (user), which other programs disturb little, and time by the clock, which needs free cores.
"""
import argparse
import os
import subprocess
import sys
import time

RUN = ["--device", "cpu", "--steps", "20", "--eval-every", "0", "--sample", "0"]


def run(program, threads):
    """Seconds of CPU time (user) and by the clock."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
    start = time.monotonic()
    process = subprocess.Popen([program, *RUN], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{program} ended with status {process.returncode}")
    return usage.ru_utime, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help="the old hybrid_train, then newer ones")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", default="1,2", help="values of OMP_NUM_THREADS, separated by commas")
    options = parser.parse_args()
    print("threads,program,user_s,clock_s,user_ratio,clock_ratio")
    for threads in map(int, options.threads.split(",")):
        times = {program: [] for program in options.programs}
        for _ in range(options.runs):
            for program in options.programs:
                times[program].append(run(program, threads))
        best = {program: [min(column) for column in zip(*rows)] for program, rows in times.items()}
        old = best[options.programs[0]]
        for program, (user, clock) in best.items():
            print(f"{threads},{program},{user:.2f},{clock:.2f},{old[0] / user:.2f},{old[1] / clock:.2f}")


if __name__ == "__main__":
    main()
