#!/usr/bin/env python3
"""Times gt_kernels.jax beside lax.scan and lax.associative_scan, forward and backward, and the overhead of a call:

    python3 bench/jax_rows.py --csv jax.csv

It times the installed package.
Each group of rows runs in its own process with a time limit, so a peer that lacks memory ends neither the others nor
the script.  A comment reports its error.  Rows appear as soon as they are ready.

ms is the time of one of several calls that are enqueued one after another, from the first to the end of the last.  L2
is warm; for a call shorter than its dispatch, ms is the dispatch.  fwd is the function under jit, bwd only the
pullback of jax.vjp, under jit.  rel_err is the error against lax.scan in float64 on the CPU, for batch element 0 and 2
heads or 8 channels: the error of y, or the largest error of a gradient that belongs only to these heads.
mem_mib is the device's peak beyond the inputs, for bwd with forward's residuals.

Overhead: call is one call from Python of a jitted function of one operation, chain is one of 64 dependent operations of
a jitted function.  jnp is norm_gate in JAX's own operations, which XLA fuses."""
import argparse
import functools
import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEADER = 'op,pass,impl,dtype,shape,ms,floor_ms,rel_err,mem_mib'
ROWS = [('selective_scan', dict(B=8, T=2048, D=1024, N=16)), ('ssd', dict(B=8, T=2048, H=64, P=64, N=128)),
        ('wkv6', dict(B=8, T=2048, H=32, N=64)), ('ssd', dict(B=2, T=2048, H=16, P=64, N=64))]
SMALL = [('selective_scan', dict(B=2, T=64, D=16, N=4)), ('ssd', dict(B=2, T=64, H=4, P=8, N=8)),
         ('wkv6', dict(B=2, T=64, H=4, N=8))]
IMPLS = ('gt', 'scan', 'associative')


def groups(small):
    """(index of a row, dtype, implementation), the most wanted first."""
    rows = range(len(SMALL if small else ROWS))
    return [(row, dtype, impl) for dtype in ('float32', 'bfloat16') for row in rows for impl in IMPLS]


# ---- in the process of a group ------------------------------------------------------------------------

def inputs(op, sizes, dtype):
    import jax.numpy as jnp
    import numpy as np
    random = np.random.default_rng(1)
    B, T, N, H, P, D = (sizes.get(name) for name in 'BTNHPD')
    if op == 'selective_scan':
        shapes = dict(u=(B, T, D), dt=(B, T, D), A=(D, N), Bm=(B, T, 1, N), Cm=(B, T, 1, N))
    elif op == 'ssd':
        shapes = dict(x=(B, T, H, P), dt=(B, T, H), A=(H,), Bm=(B, T, 1, N), Cm=(B, T, 1, N))
    else:
        shapes = dict(r=(B, T, H, N), k=(B, T, H, N), v=(B, T, H, N), w=(B, T, H, N), u=(H, N))
    arrays = {}
    for name, shape in shapes.items():
        value = random.standard_normal(shape, np.float32)
        if name == 'A':
            value = -np.exp(value)
        if name == 'dt':
            value = np.abs(value) * np.float32(0.1)
        if name == 'w':
            value = value - 2
        is_parameter = name == 'A' or (name == 'u' and op == 'wkv6')
        arrays[name] = jnp.asarray(value, 'float32' if is_parameter else dtype)
    return arrays


def associative(op, arrays):
    """S_t = a_t S_{t-1} + b_t by lax.associative_scan, in float32."""
    import jax
    import jax.numpy as jnp
    x = {name: array.astype(jnp.float32) for name, array in arrays.items()}

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def states(a, b):
        return jax.lax.associative_scan(join, (jnp.broadcast_to(a, b.shape[:2] + a.shape[2:]), b), axis=1)[1]
    if op == 'selective_scan':
        a = jnp.exp(x['dt'][..., None] * x['A'])
        y = (states(a, (x['dt'] * x['u'])[..., None] * x['Bm']) * x['Cm']).sum(-1)
        return y.astype(arrays['u'].dtype)
    if op == 'ssd':
        a = jnp.exp(x['dt'] * x['A'])[..., None, None]
        b = (x['dt'][..., None] * x['x'])[..., None] * x['Bm'][:, :, :, None]
        y = (states(a, b) * x['Cm'][:, :, :, None]).sum(-1)
        return y.astype(arrays['x'].dtype)
    kv = x['k'][..., None] * x['v'][..., None, :]
    S = states(jnp.exp(-jnp.exp(x['w']))[..., None], kv)
    before = jnp.concatenate([jnp.zeros_like(S[:, :1]), S[:, :-1]], 1)
    y = ((before + x['u'][..., None] * kv) * x['r'][..., None]).sum(3)
    return y.astype(arrays['r'].dtype)


def function(impl, op):
    import jax.numpy as jnp
    if impl == 'gt':
        import gt_kernels.jax as gt
        return lambda arrays: getattr(gt, op)(**arrays)
    if impl == 'associative':
        return functools.partial(associative, op)
    sys.path.insert(0, os.path.join(ROOT, 'python', 'tests'))
    import scans

    def scan(arrays):
        wide = {name: array.astype(jnp.promote_types(array.dtype, jnp.float32)) for name, array in arrays.items()}
        return getattr(scans, op)(**wide)[0].astype(next(iter(arrays.values())).dtype)
    return scan


def timed(call, seconds=2.0):
    """(result, ms of a call)"""
    import jax
    result = jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - start, 1e-6)
    runs, best = int(min(max(seconds / 4 / once, 1), 50)), []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(runs):
            result = call()
        jax.block_until_ready(result)
        best.append((time.perf_counter() - start) / runs * 1e3)
    return result, sorted(best)[1]


def peak_mib(inputs_mib):
    import jax
    stats = jax.devices()[0].memory_stats() or {}
    return stats['peak_bytes_in_use'] / 2 ** 20 - inputs_mib if 'peak_bytes_in_use' in stats else float('nan')


def part_of(name, op, array):
    """Batch element 0, and two heads or eight channels, of an array; all of B and C."""
    if name in ('Bm', 'Cm'):
        return array[:1]
    count = 8 if op == 'selective_scan' else 2
    if array.ndim < 3:
        return array[:count]
    return array[:1, :, :count]


def error(got, right):
    import numpy as np
    got, right = np.asarray(got, np.float64), np.asarray(right, np.float64)
    return float(np.linalg.norm(got - right) / max(np.linalg.norm(right), 1e-300))


def run_group(op, sizes, dtype, impl, write):
    import jax
    import jax.numpy as jnp
    import numpy as np
    jax.config.update('jax_enable_x64', True)
    arrays = inputs(op, sizes, dtype)
    mib = sum(array.nbytes for array in arrays.values()) / 2 ** 20
    call = function(impl, op)
    shape = ' '.join(f'{name}{size}' for name, size in sizes.items())
    short = {'float32': 'f32', 'bfloat16': 'bf16'}[dtype]
    ours = {'gt': 'gt', 'scan': 'lax.scan', 'associative': 'lax.associative_scan'}[impl]

    y, ms = timed(lambda forward=jax.jit(call): forward(arrays))
    dy = jnp.asarray(np.random.default_rng(2).standard_normal(y.shape, np.float32), y.dtype)
    part = {name: np.asarray(part_of(name, op, array), np.float64) for name, array in arrays.items()}
    with jax.default_device(jax.devices('cpu')[0]):
        part = {name: jnp.asarray(value) for name, value in part.items()}
        truth, pull = jax.vjp(function('scan', op), part)
        right = pull(jnp.asarray(np.asarray(part_of('y', op, dy), np.float64)))[0]
    write(op, 'fwd', ours, short, shape, ms, error(part_of('y', op, y), truth), peak_mib(mib))

    y, pull = jax.jit(lambda arrays: jax.vjp(call, arrays))(arrays)
    gradients, ms = timed(lambda backward=jax.jit(lambda pull, dy: pull(dy)[0]): backward(pull, dy))
    own = [name for name in gradients if name not in ('A', 'Bm', 'Cm') and gradients[name].ndim > 2]
    worst = max(error(part_of(name, op, gradients[name]), right[name]) for name in own)
    write(op, 'bwd', ours, short, shape, ms, worst, peak_mib(mib))


def run_overhead(write):
    import jax
    import jax.numpy as jnp
    import gt_kernels.jax as gt
    x, gamma = jnp.ones((16, 64)), jnp.ones((64,))

    def plain(x, z, gamma):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma
    for name, one in (('gt', gt.norm_gate), ('jnp', plain)):
        def chain(x, one=one):
            for _ in range(64):
                x = one(x, None, gamma)
            return x
        call, many = jax.jit(lambda x, one=one: one(x, None, gamma)), jax.jit(chain)
        right = plain(x, None, gamma)
        jax.block_until_ready(call(x))
        start = time.perf_counter()
        for _ in range(2000):
            y = call(x)
        jax.block_until_ready(y)
        write('norm_gate', 'call', name, 'f32', 'M16 D64', (time.perf_counter() - start) / 2, error(y, right),
              float('nan'))
        y, ms = timed(lambda many=many: many(x), 4.0)
        write('norm_gate', 'chain', name, 'f32', 'M16 D64', ms / 64, error(y, right), float('nan'))


# ---- the script -----------------------------------------------------------------------------------------

def write_row(op, pass_, impl, dtype, shape, ms, rel_err, mem_mib):
    print(f'{op},{pass_},{impl},{dtype},{shape},{ms:.4f},nan,{rel_err:.3e},{mem_mib:.3f}', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--csv', help='also write the rows there')
    parser.add_argument('--only', default='',
                        help='run only groups whose name contains this, such as "selective_scan float32 gt"')
    parser.add_argument('--limit', type=float, default=90, help='time limit of a group, in seconds')
    parser.add_argument('--seconds', type=float, default=540,
                        help='time limit of all groups, in seconds; later groups are not run')
    parser.add_argument('--small', action='store_true', help='small sizes, to try the script')
    parser.add_argument('--group', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.group == 'overhead':
        return run_overhead(write_row)
    if args.group:
        row, dtype, impl = args.group.split()
        op, sizes = (SMALL if args.small else ROWS)[int(row)]
        return run_group(op, sizes, dtype, impl, write_row)
    return run_all(args)


def run_all(args):
    started, file = time.monotonic(), open(args.csv, 'w', encoding='utf-8') if args.csv else None

    def say(text):
        print(text, flush=True)
        if file:
            print(text, file=file, flush=True)
    about = "import jax; d = jax.devices()[0]; print('# jax', jax.__version__ + ', device:', d.device_kind)"
    env = {**os.environ, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'PYTHONDONTWRITEBYTECODE': '1'}
    try:
        say(subprocess.run([sys.executable, '-c', about], stdout=subprocess.PIPE, text=True, timeout=120, check=True,
                           env=env).stdout.strip())
    except (subprocess.SubprocessError, OSError) as failure:
        sys.exit(f'jax_rows.py: JAX does not start: {failure}')
    say(HEADER)
    table = SMALL if args.small else ROWS
    names = [(f'{row} {dtype} {impl}', f'{table[row][0]} {dtype} {impl}') for row, dtype, impl in groups(args.small)]
    names.insert(6, ('overhead', 'overhead'))
    failed = 0
    for group, name in names:
        if args.only not in name:
            continue
        left = args.seconds - (time.monotonic() - started)
        if left < 5:
            say(f'# {name}: not run, because no time is left')
            failed += 1
            continue
        command = [sys.executable, os.path.abspath(__file__), '--group', group]
        command += ['--small'] if args.small else []
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
                                 timeout=min(args.limit, left))
            rows, why = run.stdout, (run.stderr.strip().splitlines() or ['']) if run.returncode else None
            why = why and why[-1][:300]
        except subprocess.TimeoutExpired as failure:
            rows, why = failure.stdout or '', 'it took too long'
            rows = rows.decode() if isinstance(rows, bytes) else rows
        for row in rows.splitlines():
            say(row)
        if why is not None:
            failed += 1
            say(f'# {name}: {why}')
    print(f'{failed} groups failed or were not run, {time.monotonic() - started:.0f} s', file=sys.stderr)


if __name__ == '__main__':
    main()
