#!/usr/bin/env python3
"""Times gt_kernels.torch.distributed: one long sequence whose tokens are split over the GPUs of this machine.

    python3 bench/context.py --csv context.csv              1, 2, 4, ... GPUs, a million tokens
    python3 bench/context.py --check                        on a CPU, with gloo and 2 processes: compares, times nothing

There is one process for each GPU, and NCCL exchanges the states between them.  First each operator runs on a shorter
sequence, forward and backward.  Every rank computes the same sequence alone, too, and compares its tokens of y and of
the gradients of activations with that.  error is the largest relative difference (2-norm) of any rank.  An operator
whose error is over the limit gives a comment, and no time.

ms is the time of a call from the first rank's start to the last rank's end, by the clock after a barrier: the median of
some runs.  peak_mib is the most memory that PyTorch's tensors had on one GPU, inputs and gradients among it.  fwd is a
forward call that autograd records, bwd the backward call.  Tensors are bf16; decays, A and Dskip are fp32.

NVLink multicast stays off unless NCCL_NVLS_ENABLE is set, because it can disturb other users of a host's switches."""
import argparse
import datetime
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist

RUNS, WARM_UPS, LIMIT = 5, 2, 5e-3
HEADING = 'op,pass,gpus,dtype,shape,ms,peak_mib,error'
SHAPES = {'wkv6': 'H32 N64', 'ssd': 'H64 P64 N128', 'conv_ssd': 'H64 P64 N128 W4'}


def tensors_of(op, tokens, seed, device):
    """Activations of one piece of the sequence, and parameters, which are the same for every piece."""
    def randn(*shape, spread=1.0, mean=0.0, dtype=torch.bfloat16):
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (mean + spread * x).to(dtype)

    generator = torch.Generator(device).manual_seed(12345)
    H, N, P = (32, 64, 64) if op == 'wkv6' else (64, 128, 64)
    if op == 'wkv6':
        parameters = [randn(H, N, spread=0.5, dtype=torch.float32)]
    else:
        A, Dskip = -1 - randn(H, spread=0.2, dtype=torch.float32).abs(), randn(H, dtype=torch.float32)
        parameters = [A, Dskip] + [randn(H * P + 2 * N, 4, spread=0.3)] * (op == 'conv_ssd')
    generator.manual_seed(seed)
    if op == 'wkv6':
        activations = [randn(1, tokens, H, N) for _ in 'rkv'] + [randn(1, tokens, H, N, mean=-2.0)]
    else:
        dt = randn(1, tokens, H, spread=0.5, mean=-3.0)
        if op == 'ssd':
            activations = [randn(1, tokens, H, P), dt, randn(1, tokens, 1, N), randn(1, tokens, 1, N)]
        else:
            activations = [randn(1, tokens, H * P + 2 * N), dt]
    return activations, parameters


def call_of(module, op, activations, parameters, **options):
    if op == 'wkv6':
        return module.wkv6(*activations, *parameters, **options)
    if op == 'ssd':
        x, dt, Bm, Cm = activations
        return module.ssd(x, dt, parameters[0], Bm, Cm, parameters[1], softplus=True, **options)
    (xBC, dt), (A, Dskip, weight) = activations, parameters
    return module.conv_ssd(xBC, dt, weight, A, None, Dskip, state_size=128, softplus=True, **options)


def gradients_of(y, activations, seed):
    generator = torch.Generator(y.device).manual_seed(seed)
    dy = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32).to(y.dtype)
    return torch.autograd.grad(y, activations, dy)


def compare(op, rank, ranks, tokens, device, group):
    """The largest relative difference between this rank's results and those of a plain call on the whole sequence."""
    import gt_kernels.torch as gt
    from gt_kernels.torch import distributed
    pieces = [tensors_of(op, tokens, seed, device) for seed in range(ranks)]
    mine = [x.clone().requires_grad_() for x in pieces[rank][0]]
    y = call_of(distributed, op, mine, pieces[rank][1], group=group)
    found = [y, *gradients_of(y, mine, 100 + rank)]
    whole = [torch.cat(parts, 1).requires_grad_() for parts in zip(*(piece[0] for piece in pieces))]
    y = call_of(gt, op, whole, pieces[0][1])
    dy = torch.cat([torch.randn((1, tokens, *y.shape[2:]), device=device, dtype=torch.float32,
                                generator=torch.Generator(device).manual_seed(100 + piece)).to(y.dtype)
                    for piece in range(ranks)], 1)
    right = [y, *torch.autograd.grad(y, whole, dy)]
    errors = []
    for one, other in zip(found, right):
        one, other = one.detach(), other.detach()
        other = other[:, rank * tokens:(rank + 1) * tokens].double()
        errors.append(float((one.double() - other).norm() / other.norm()))
    worst = torch.tensor([max(errors) if all(error == error for error in errors) else float('inf')], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return float(worst)


def times_of(op, rank, ranks, tokens, device, group):
    """Milliseconds of forward and backward, and the peak of memory in MiB, of the slowest and largest rank."""
    from gt_kernels.torch import distributed
    activations, parameters = tensors_of(op, tokens // ranks, rank, device)
    activations = [x.requires_grad_() for x in activations]
    torch.cuda.reset_peak_memory_stats()
    found = {'fwd': [], 'bwd': []}
    dy = None

    def timed(name, work):
        torch.cuda.synchronize()
        dist.barrier(group)
        begin = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group)
        found[name].append(1e3 * float(spent))
        return result

    for _ in range(WARM_UPS + RUNS):
        y = timed('fwd', lambda: call_of(distributed, op, activations, parameters, group=group))
        dy = torch.ones_like(y) if dy is None else dy
        timed('bwd', lambda: torch.autograd.grad(y, activations, dy))
        del y
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**20], device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    return {name: statistics.median(times[WARM_UPS:]) for name, times in found.items()}, float(peak)


def work(rank, ranks, port, options):
    """The main function of a process."""
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    is_check = options.check
    if is_check:
        torch.set_num_threads(1)
    device = torch.device('cpu' if is_check else f'cuda:{rank}')
    if not is_check:
        torch.cuda.set_device(device)
    dist.init_process_group('gloo' if is_check else 'nccl', rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=120))
    out = open(options.csv, 'a') if options.csv and rank == 0 else None

    def write(line):
        if rank == 0:
            print(line, flush=True)
            if out:
                print(line, file=out, flush=True)

    groups = {}
    count = ranks
    while count:  # every process must make every group
        groups[count] = dist.new_group(list(range(count)))
        count //= 2
    failed = 0
    for op in options.ops.split(','):
        for count in sorted(groups):
            group = groups[count]
            if rank < count:
                error = compare(op, rank, count, 96 if is_check else 32768, device, group)
                if not error <= LIMIT:
                    write(f'# failed: {op} on {count}: differs by {error:.1e}')
                    failed += 1
                elif is_check:
                    write(f'ok: {op} on {count}: {error:.1e}')
                else:
                    times, peak = times_of(op, rank, count, options.tokens, device, group)
                    for name, ms in times.items():
                        write(f'{op},{name},{count},bf16,T{options.tokens} {SHAPES[op]},{ms:.3f},{peak:.0f},'
                              f'{error:.1e}')
                torch.cuda.empty_cache() if not is_check else None
            dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ops', metavar='A,B', default=','.join(SHAPES), help='of: ' + ', '.join(SHAPES))
    parser.add_argument('--tokens', metavar='N', type=int, default=2**20, help='tokens of the sequence')
    parser.add_argument('--csv', metavar='FILE', help='write the rows to FILE too')
    parser.add_argument('--check', action='store_true', help='compare two processes on the CPU')
    options = parser.parse_args()
    for op in options.ops.split(','):
        if op not in SHAPES:
            parser.error(f'--ops: {op!r} is none of {", ".join(SHAPES)}')
    ranks = 2 if options.check else torch.cuda.device_count()
    if ranks == 0:
        sys.exit('PyTorch finds no GPU')
    os.environ.setdefault('NCCL_NVLS_ENABLE', '0')
    if not options.check:
        head = f'# gpus: {ranks} x {torch.cuda.get_device_name()}; torch {torch.__version__}, CUDA {torch.version.cuda}'
        print(head, HEADING, sep='\n', flush=True)
        if options.csv:
            with open(options.csv, 'w') as file:
                print(head, HEADING, sep='\n', file=file)
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (ranks, port, options), ranks)


if __name__ == '__main__':
    main()
