#!/usr/bin/env python3
"""The numbers of the documents, made from bench/results and from the trainer's plan.

    check [--hybrid PROGRAM]   finds each text below in its document; a missing one is printed.  With PROGRAM it also
                               compares the rows of bench/results/plan.csv with the program's plan of today.
    plan PROGRAM               writes bench/results/plan.csv

A document and its results change together: after new results `check` prints the sentences that the document must have.
"""
import argparse
import csv
import io
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, 'bench', 'results')

# Options of hybrid_train, and the names of its plan's rows.
PLANS = ['--model HY --dtype f32 --plan 8,16,32,64 --seq 64',
         '--model HY --plan 8,64 --seq 64',
         '--model HY --plan 8,64 --seq 256',
         '--model HY --plan 8 --seq 4096',
         '--model HY --fuse conv_ssd --plan 8 --seq 4096',
         '--model 8M --plan 8,32 --seq 256',
         '--model 8M --plan 16 --seq 1024',
         '--model 8M --plan 8 --seq 4096',
         '--model 8M --fuse conv_ssd --plan 8 --seq 4096',
         '--model RWKV-6 --plan 8 --seq 4096',
         '--model Mamba-2 --plan 8 --seq 4096',
         '--model GF --hidden 2048 --layers 13 --head-size 64 --plan 16 --seq 1024']

# Functions of rows in docs/lab/norms.md.  A second table there has the first five, as gt_bench times them.
ROWS = [('add_norm', shape) for shape in ('M16384 D128', 'M65536 D512', 'M32768 D1024', 'M32768 D2048', 'M32768 D4096',
                                          'M32768 D5120')] + \
       [('norm_gate', shape) for shape in ('M16384 D128 RMS', 'M65536 D512 RMS', 'M32768 D1024 RMS', 'M32768 D2048 RMS',
                                           'M32768 D4096 RMS', 'M16384 D128 heads of 32', 'M30000 D256 heads of 64',
                                           'M65536 D512 heads of 64')]


class Failure(Exception):
    pass


def lines_of(name):
    with open(os.path.join(RESULTS, name), encoding='utf-8') as file:
        return [line for line in file if line.strip() and not line.startswith('#')]


class Rows:
    """Rows of one file of results.  A file may have several headings."""

    def __init__(self, name):
        self.name, self.rows, heading = name, [], None
        for cells in csv.reader(lines_of(name)):
            if heading is None or cells[0] == heading[0]:
                heading = cells
            else:
                self.rows.append(dict(zip(heading, cells)))

    def find(self, **keys):
        """The first row with these values; keys name columns, and pass_ is the column pass."""
        keys = {key.rstrip('_'): str(value) for key, value in keys.items()}
        for row in self.rows:
            if all(row.get(key) == value for key, value in keys.items()):
                return row
        raise Failure(f'{self.name}: no row with {keys}')

    def all(self, **keys):
        """All rows with these values, at least one."""
        self.find(**keys)
        keys = {key.rstrip('_'): str(value) for key, value in keys.items()}
        return [row for row in self.rows if all(row.get(key) == value for key, value in keys.items())]

    def starting(self, column, start):
        """The first value of a column that begins with start."""
        for row in self.rows:
            if row.get(column, '').startswith(start):
                return row[column]
        raise Failure(f'{self.name}: no {column} begins with {start}')


def mean(rows, column):
    return sum(float(row[column]) for row in rows) / len(rows)


def significant(number, digits):
    """1234.5 with 3 digits: 1,230."""
    text = f'{float(f"{number:.{digits - 1}e}"):,}'
    return text[:-2] if text.endswith('.0') else text


def whole(number):
    return f'{round(float(number)):,}'


def ms(row):
    return float(row['ms'])


def milliseconds(row):
    """Three digits, at most four places."""
    return f'{ms(row):.{3 if ms(row) >= .1 else 4}f}'


def plan_rows(program):
    """plan.csv: the heading with the column `options` in front, then a row for each model and batch."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator='\n')
    heading = None
    for options in PLANS:
        result = subprocess.run([program, *options.split()], capture_output=True, text=True)
        if result.returncode:
            raise Failure(f'{program} {options}: {result.stderr.strip()}')
        for cells in csv.reader(line for line in result.stdout.splitlines() if not line.startswith('#')):
            if cells[0] != 'model':
                writer.writerow([options, *cells])
            elif heading is None:
                heading = cells
                writer.writerow(['options', *cells])
    return out.getvalue()


def texts():
    """Pairs of a document and a text that it must have."""
    model, plan, steps = Rows('h200_protocol.csv'), Rows('plan.csv'), Rows('h200_generate.csv')
    ours, peers = Rows('h200.csv'), Rows('h200_peers.csv')

    def speed(pass_, batch, seq, dtype='bf16', name='HY'):
        return whole(model.find(model=name, device='cuda', dtype=dtype, pass_=pass_, batch=batch, seq=seq)['tokens_per_s'])

    def per_parameter(pass_, batch, seq):
        return whole(model.find(model='HY', dtype='bf16', pass_=pass_, batch=batch, seq=seq)
                     ['tokens_per_s_per_1000_parameters'])

    def memory(column, options, batch):
        return float(plan.find(options=options, batch=batch)[column])

    def ratio(op, pass_, impl, dtype, shape):
        keys = {'op': op, 'pass_': pass_, 'dtype': dtype, 'shape': shape}
        return ms(peers.find(impl=impl, **keys)) / ms(ours.find(impl='gt', **keys))

    seeds, training, readme = 'docs/seeds.md', 'docs/training.md', 'README.md'

    # ---- speed ----
    yield seeds, (f"{speed('inf', 8, 64, 'f32')} tokens/s, "
                  f"{float(model.find(dtype='f32', pass_='inf', batch=8, seq=64)['latency_ms']):.2f} ms, fp32; "
                  f"{speed('inf', 8, 64)} in bf16")
    yield seeds, ', '.join(speed('inf', batch, 64, 'f32') for batch in (16, 32, 64)) + ' in fp32'
    yield seeds, f"{speed('step', 8, 256)} for whole steps in bf16"
    yield seeds, f"{speed('inf', 8, 256)} at 256 tokens, {speed('inf', 8, 2048)} at 2048, bf16"
    yield seeds, (f"inference {per_parameter('inf', 8, 256)} to {per_parameter('inf', 8, 4096)}, whole steps "
                  f"{per_parameter('step', 8, 256)} to {per_parameter('step', 8, 4096)}; steps in batches of 64 x 256: "
                  f"{per_parameter('step', 64, 256)}")
    for pass_ in 'inf', 'step':
        yield seeds, (f"`Mamba-2` {speed(pass_, 8, 256, name='Mamba-2')} and `RWKV-6` "
                      f"{speed(pass_, 8, 256, name='RWKV-6')}")
    loop = [ratio('wkv6', pass_, 'torch loop', 'bf16', 'B64 T256 H4 N64') for pass_ in ('fwd', 'bwd')]
    yield seeds, (f'{significant(loop[0], 3)} and {significant(loop[1], 3)} times a loop over tokens in PyTorch, '
                  'B64 T256 H4 N64, bf16')
    shape, loops = 'B8 T2048 H32 N64', ('torch loop', 'torch loop graph')
    loop = [significant(ratio('wkv6', pass_, impl, 'bf16', shape), 3) for impl in loops for pass_ in ('fwd', 'bwd')]
    yield seeds, (f'{shape}, bf16: {loop[0]} and {loop[1]} times, or {loop[2]} and {loop[3]} times if a CUDA graph '
                  'replays the loop')
    peak = [peers.find(op='wkv6', pass_='bwd', impl=loops[0], dtype='bf16', shape=shape),
            ours.find(op='wkv6', pass_='bwd', impl='gt', dtype='bf16', shape=shape)]
    yield seeds, '{} MiB beside {} MiB here'.format(*(whole(row['mem_mib']) for row in peak))
    norms = [sum(ms(peers.find(op='norm_mix', pass_=pass_, impl='torch.compile', dtype='bf16', shape=shape))
                 for pass_ in ('fwd', 'bwd')) /
             sum(ms(ours.find(op='norm_mix', pass_=pass_, impl='gt', dtype='bf16', shape=shape))
                 for pass_ in ('fwd', 'bwd'))
             for shape in ('M16384 D128', 'M65536 D512', 'M32768 D2048')]
    yield seeds, f'{min(norms):.1f} to {max(norms):.1f} times as fast as torch.compile, forward and backward together'
    linear = [ratio('rmsnorm_linear', pass_, 'torch', 'bf16', 'M32768 D2048 O8192') for pass_ in ('fwd', 'bwd')]
    yield seeds, f'{linear[0]:.2f} and {linear[1]:.2f} times as fast as PyTorch\'s two calls at M32768 D2048 O8192'
    cpu = {dtype: max(float(row['cpu_speedup']) for row in model.rows
                      if row.get('cpu_speedup') and row['dtype'] == dtype) for dtype in ('f32', 'bf16')}
    yield seeds, f"1/{cpu['f32']:.0f} of the time in fp32 and 1/{cpu['bf16']:.0f} in bf16"
    for batch in (1, 64):
        row = steps.find(model='HY', batch=batch, parameters=3124192)
        yield seeds, f"{whole(row['tokens_per_s'])} tokens a second in batches of {batch}"

    # ---- memory ----
    taken = [model.find(model='HY', dtype='bf16', pass_='step', batch=8, seq=seq)
             for seq in (256, 512, 1024, 2048, 4096)]
    for column in 'peak_mib', 'model_mib':
        yield seeds, '{}, {}, {}, {} and {} MiB'.format(*(f'{float(row[column]):.0f}' for row in taken))
    small = PLANS[0]
    yield seeds, '{}, {}, {}, {} MiB'.format(*(memory('inference', small, batch) for batch in (8, 16, 32, 64)))
    yield seeds, f"| {memory('inference', small, 64)} MiB | met |"
    yield seeds, f"{memory('training', PLANS[2], 8):.0f} MiB in bf16"
    long = [float(plan.find(options=options, batch=8)['inference_kib_per_token']) for options in (PLANS[3], PLANS[10], PLANS[9])]
    yield seeds, f'{long[0]:.1f} KiB hybrid'
    yield seeds, f'{long[1]:.1f} `Mamba-2`, {long[2]:.1f} `RWKV-6`'
    for name, options, batch, seq in (('`HY`', PLANS[1], 8, 64), ('`HY`', PLANS[1], 64, 64), ('`HY`', PLANS[2], 8, 256),
                                      ('`HY`', PLANS[2], 64, 256), ('`HY`', PLANS[3], 8, 4096), ('`8M`', PLANS[5], 8, 256),
                                      ('`8M`', PLANS[5], 32, 256), ('`8M`', PLANS[6], 16, 1024)):
        yield seeds, (f'| {name}, {batch} x {seq} | ' +
                      ' | '.join(whole(memory(column, options, batch))
                                 for column in ('training', 'training_recompute', 'inference')) + ' |')
    yield seeds, (', 16 x 1024 | ' + ' | '.join(whole(memory(column, PLANS[11], 16)) for column in
                                                ('training', 'training_recompute', 'inference')) + ' |')
    whole_step = {name: [whole(memory('training', f'--model {name}{fuse} --plan 8 --seq 4096', 8))
                         for fuse in ('', ' --fuse conv_ssd')] for name in ('HY', '8M')}
    again = {name: [whole(memory('training_recompute', f'--model {name}{fuse} --plan 8 --seq 4096', 8))
                    for fuse in ('', ' --fuse conv_ssd')] for name in ('HY', '8M')}
    yield training, (f"| plan of 8 windows of 4096 tokens in bf16: `HY`, `8M` | {whole_step['HY'][0]} MiB, {whole_step['8M'][0]} "
                     f"| {whole_step['HY'][1]}, {whole_step['8M'][1]} |")
    yield training, (f"| the same with `recompute` | {again['HY'][0]}, {again['8M'][0]} | {again['HY'][1]}, "
                     f"{again['8M'][1]} |")
    yield training, (f"training `HY` takes {again['HY'][0]} MiB instead of {whole_step['HY'][0]}, `8M` {again['8M'][0]} "
                     f"instead of {whole_step['8M'][0]}")

    # ---- the README's table of decoding, and a whole model ----
    def step(shape, op, impl='gt'):
        return (ours if impl == 'gt' else peers).find(op=op, pass_='step', impl=impl, dtype='bf16', shape=shape)

    def decoding(op, shape, batches, suffix='', peer=None, bold=False):
        names = [shape.format(batch) + suffix for batch in batches]
        floors = ' / '.join(floor(float(step(name, op)['floor_ms'])) for name in names)
        times = ' / '.join(milliseconds(step(name, op)) for name in names)
        others = ' / '.join(milliseconds(step(name, op, peer)) for name in names) if peer else ''
        if bold:
            others = f'**{others}**'
        return f'| {floors} | {times} | {others}{" " if others else ""}|'

    def floor(number):
        return f'{number:.{3 if number >= .005 else 4}f}'

    heads = 'B{} T1 H128 P64 N128 G8'
    for cells in (decoding('ssd', heads, (1, 8, 64, 256), peer='mamba_ssm'),
                  decoding('ssd', heads, (1, 64, 256), ' small'),
                  decoding('ssd', 'B{} T1 H128 P80 N128 G8', (64,), peer='mamba_ssm'),
                  decoding('ssd', 'B{} T1 H32 P128 N256 G2', (64,), peer='mamba_ssm'),
                  decoding('selective_scan', 'B{} T1 D8192 N16', (1, 64, 256), peer='mamba_ssm', bold=True),
                  decoding('wkv6', 'B{} T1 H32 N64', (1, 8, 64, 256)),
                  decoding('conv1d', 'B{} T1 D10240 W4 silu', (1, 64, 256)),
                  decoding('conv1d', 'B{} T1 D10240 W4 silu', (1, 64, 256), ' small', peer='causal_conv1d'),
                  decoding('conv_ssd', 'B{} T1 H128 P64 N128 W4 G8', (1, 64))):
        yield readme, cells
    million = float(model.find(model='HY', dtype='bf16', pass_='step', batch=64, seq=256)['tokens_per_s']) / 1e6
    yield readme, f'trains on {million:.1f} million tokens a second'
    yield training, f'`HY` with 64 windows of 256 trains on {million:.1f} million tokens a second'


    # ---- ranks on two GPUs ----
    multi = Rows('h200_multi.csv')
    nccl = multi.starting('transport', 'NCCL')

    def ranks(name, batch, keys, digits, waits=False):
        rows = multi.all(batch=batch, **keys)
        waiting = f" {mean(rows, 'waiting'):.1f} % of a step |" if waits else ' |'
        return (f"| {name} | {batch} | {mean(rows, 'tokens_per_s') / 1e6:.2f} million | "
                f"{mean(rows, 'ms_per_step'):.{digits}f} |{waiting}")

    def rate(**keys):
        return mean(multi.all(**keys), 'tokens_per_s')

    scaling, one = 'docs/scaling.md', dict(part='one', transport='none')
    for cells in (ranks('one process', 64, one, 3),
                  ranks('one rank with NCCL', 64, dict(part='one', transport=nccl), 3, True),
                  ranks('weak scaling: two GPUs, NCCL', 128, dict(part='weak', transport=nccl), 3, True),
                  ranks('strong scaling: two GPUs, NCCL', 64, dict(part='strong', transport=nccl), 3, True),
                  ranks('two GPUs, MPI through host memory', 128, dict(part='weak', transport='MPI'), 2),
                  ranks('two processes on one GPU, MPI', 128, dict(part='shared', transport='MPI'), 2)):
        yield scaling, cells
    weak = 50 * rate(part='weak', transport=nccl) / rate(**one)
    yield scaling, f'with 64 windows each train on {weak:.1f} % of twice the tokens'
    yield scaling, f"share 64 windows are {rate(part='strong', transport=nccl) / rate(**one):.2f} times as fast"
    cost = mean(multi.all(part='one', transport=nccl), 'ms_per_step') / mean(multi.all(**one), 'ms_per_step') - 1
    yield scaling, f'With one rank NCCL costs {100 * cost:.1f} % of a step'

    # ---- a sequence over two GPUs ----
    pieces = Rows('h200_context.csv')
    for op in 'wkv6', 'ssd', 'conv_ssd':
        cells, memory = [], []
        for pass_ in 'fwd', 'bwd':
            for gpus in '1', '2':
                row = pieces.find(op=op, pass_=pass_, gpus=gpus)
                cells.append(f"{ms(row):.1f}")
                memory.append(f"{float(row['peak_mib']) / 1024:.0f}")
        shape = row['shape'].split(' ', 1)[1]
        yield scaling, f"| `{op}` {shape} | {' | '.join(cells)} | {memory[2]} | {memory[3]} |"

    # ---- functions of rows beside torch.compile ----
    def pair(op, shape, impl, rows=peers):
        return ' / '.join(milliseconds(rows.find(op=op, pass_=pass_, impl=impl, dtype='bf16', shape=shape))
                          for pass_ in ('fwd', 'bwd'))

    for op, shape in ROWS:
        yield 'docs/lab/norms.md', (f"| {op}, {shape} | {pair(op, shape, 'gt_kernels.torch')} | "
                                    f"{pair(op, shape, 'torch.compile')} | {pair(op, shape, 'torch')} |")
    for op, shape in ROWS[:5]:
        yield 'docs/lab/norms.md', f"| {shape} | {pair(op, shape, 'gt', ours)} | {pair(op, shape, 'torch.compile')} |"

    # ---- the recipe for a small text ----
    recipe = Rows('h200_recipe.csv')
    tried = len(recipe.rows) - 6  # the last six rows are those of three seeds
    for name in 'HY', 'GF':
        seeded = [row for row in recipe.rows[tried:] if row['model'] == name]
        yield training, (f"{', '.join(row['held_out_loss'] for row in seeded)} | "
                         f"{mean(seeded, 'held_out_loss'):.3f} |")
    for row in recipe.rows[:tried]:
        model_ = '' if row['model'] == 'HY' else f"--model {row['model']} "
        words = (model_ + row['other']).split()
        options = ' '.join(f'`{name[2:]} {value}`' for name, value in zip(words[::2], words[1::2]))
        yield training, (f"| {row['batch']}, {row['steps']} | {row['lr']} | {row['dropout']} | "
                         f"{row['weight_decay'] or '0.1'} | {options}{' ' if options else ''}| {row['held_out_loss']} |")

    # ---- whole models in plain PyTorch ----
    whole_models = Rows('h200_plain.csv')

    def beside(model_, pass_, launch, memory_too=False):
        """How many times as fast the model is on gt_kernels.torch, with both times."""
        slow, fast = (whole_models.find(model=model_, pass_=pass_, launch=launch, impl=impl)
                      for impl in ('plain PyTorch', 'gt_kernels.torch'))
        times_ = [float(row['latency_ms']) for row in (slow, fast)]
        used = f", {whole(slow['peak_mib'])} to {whole(fast['peak_mib'])} MiB" if memory_too else ''
        return (f'{times_[0] / times_[1]:.0f} times{{}} (' +
                ' to '.join(significant(time, 3) for time in times_) + f' ms{used})')

    def both_passes(model_, launch, memory_too=False):
        return (beside(model_, 'inf', launch).format(' as fast in inference') + ', ' +
                beside(model_, 'fwd+bwd', launch, memory_too).format(' in forward and backward'))

    yield seeds, both_passes('HY', 'graph', True)
    yield seeds, both_passes('HY', 'eager')
    yield seeds, both_passes('RWKV-6 24x2048', 'eager', True)
    graphs = [significant(float(whole_models.find(model='RWKV-6 24x2048', pass_=pass_, launch='graph',
                                                  impl='gt_kernels.torch')['latency_ms']), 3)
              for pass_ in ('inf', 'fwd+bwd')]
    yield seeds, f'As graphs `gt_kernels.torch` takes {graphs[0]} and {graphs[1]} ms'

    yield seeds, beside('HY 24x2048', 'inf', 'eager').format(' as fast in inference')
    hy = [whole_models.find(model='HY 24x2048', pass_=pass_, launch='graph', impl='gt_kernels.torch')
          for pass_ in ('inf', 'fwd+bwd')]
    yield seeds, (f"As graphs `gt_kernels.torch` takes {significant(float(hy[0]['latency_ms']), 3)} ms, and "
                  f"{significant(float(hy[1]['latency_ms']), 3)} ms in forward and backward ({whole(hy[1]['peak_mib'])} MiB)")

    def speeds(launch, impl='gt_kernels.torch'):
        rows = [whole_models.find(model=f'Mamba-2 {size}', pass_='inf', seq='2048', launch=launch, impl=impl)
                for size in ('130M', '1.4B', '2.8B')]
        return '{}, {} and {}'.format(*(f"{int(float(row['tokens_per_s'])):,}" for row in rows))

    yield seeds, (f"as graphs: {speeds('graph')} tokens/s; started from Python {speeds('eager')}; "
                  f"plain PyTorch {speeds('eager', 'plain PyTorch')}")
    long = whole_models.find(model='Mamba-2 2.8B', seq='8192', launch='graph', impl='gt_kernels.torch')
    yield seeds, f"2.8B with 8192 tokens: {int(float(long['tokens_per_s'])):,} tokens/s"
    plain_, own = (whole_models.find(model='Mamba-2 130M', pass_='fwd+bwd', launch=launch, impl=impl)
                   for launch, impl in (('eager', 'plain PyTorch'), ('graph', 'gt_kernels.torch')))
    yield seeds, (f"{int(float(own['tokens_per_s'])):,} tokens/s as graphs; plain PyTorch "
                  f"{int(float(plain_['tokens_per_s']))} ({significant(float(plain_['latency_ms']), 3)} to "
                  f"{significant(float(own['latency_ms']), 3)} ms, {whole(plain_['peak_mib'])} to {whole(own['peak_mib'])} MiB)")

    # ---- retrieval ----
    found = {}
    for row in Rows('h200_needle.csv').rows:
        found.setdefault((row['model'], int(row['length'])), []).append(100 * float(row['share']))
    for (name, length), shares in found.items():
        yield training, (f'| {length:,} | `{name}` | ' + ' | '.join(f'{share:.0f}' for share in shares) +
                         f' | {sum(shares) / len(shares):.0f} |')

    reached = [sum(shares) / len(shares) for (name, _), shares in sorted(found.items()) if name == 'RWKV-6 to 4096']
    yield seeds, ('{:.0f}, {:.0f} and {:.0f} % at 1,024, 2,048 and 4,096 tokens; {:.0f} % at 8,192 and {:.0f} % at 16,384'
                  .format(*reached))

    # ---- the selective scan in JAX ----
    jax = Rows('h200_jax.csv')
    scan = {(impl, pass_): jax.find(op='selective_scan', pass_=pass_, impl=impl, dtype='f32', shape='B8 T2048 D1024 N16')
            for impl in ('gt', 'lax.scan', 'lax.associative_scan') for pass_ in ('fwd', 'bwd')}

    def both(write, *impls):
        """A number of forward and of backward."""
        return ' and '.join(write(*(scan[impl, pass_] for impl in impls)) for pass_ in ('fwd', 'bwd'))

    def factor(other, own):
        return significant(ms(other) / ms(own), 2)

    def mib(row):
        return whole(row['mem_mib'])

    def short(row):
        return significant(ms(row), 3)

    times = f"{both(short, 'gt')} ms against {both(short, 'lax.associative_scan')}, and against {both(short, 'lax.scan')}"
    yield seeds, (f"{both(factor, 'lax.associative_scan', 'gt')} times as fast as `lax.associative_scan`, "
                  f"{both(factor, 'lax.scan', 'gt')} times as fast as `lax.scan`, forward and backward, "
                  f'B8 T2048 D1024 N16 in fp32 ({times})')
    yield seeds, (f"{mib(scan['gt', 'fwd'])} MiB instead of {mib(scan['lax.associative_scan', 'fwd'])} in forward, "
                  f"{mib(scan['gt', 'bwd'])} instead of {mib(scan['lax.associative_scan', 'bwd'])} in backward")
    yield 'docs/xla.md', (f"{short(scan['gt', 'fwd'])} ms forward and {short(scan['gt', 'bwd'])} ms backward. "
                          f"`lax.associative_scan` takes {both(factor, 'lax.associative_scan', 'gt')} times as long, and "
                          f"{both(mib, 'lax.associative_scan')} MiB instead of {both(mib, 'gt')}")

    # ---- estimates for other GPUs ----
    # Data sheets: GB/s, and TFLOP/s of dense bf16 products with fp32 sums.
    h200 = 4800, 990
    copies = 4215.9 / h200[0]  # share of its bandwidth at which the H200 copies, as in h200.csv
    ptx = Rows('h200_ptx.csv')
    shape = 'B8 T4096 H64 P64 N128'
    portable = max(ms(ptx.find(op='ssd', pass_=pass_, dtype='bf16', shape=shape)) /
                   ms(ours.find(op='ssd', pass_=pass_, impl='gt', dtype='bf16', shape=shape)) for pass_ in ('fwd', 'bwd'))
    for name, bandwidth, products in (('A100, 80 GB', 2039, 312), ('RTX 4090', 1008, 165), ('RTX 4050, laptop', 192, 20)):
        times = [float(step(shape, op)['floor_ms']) * 4215.9 / (copies * bandwidth)
                 for op, shape in (('ssd', 'B64 T1 H128 P64 N128 G8'), ('wkv6', 'B64 T1 H32 N64'))]
        least = million * 1e6 / portable / max(h200[0] / bandwidth, h200[1] / products)
        most = copies * bandwidth * 1e9 / (520 * 1024)
        yield readme, (f'| {name} | {bandwidth:,} | {products} | {significant(times[0], 2)} | {significant(times[1], 2)} | '
                       f'{significant(least, 2)} to {significant(most, 2)} |')


def check(options):
    faults = []
    documents = {}
    for name, text in texts():
        if name not in documents:
            with open(os.path.join(ROOT, name), encoding='utf-8') as file:
                documents[name] = re.sub(r'\s+', ' ', file.read())
        if re.sub(r'\s+', ' ', text) not in documents[name]:
            faults.append(f'{name}: this text is missing: {text}')
    if options.hybrid and plan_rows(options.hybrid).splitlines() != [line.rstrip('\n') for line in lines_of('plan.csv')]:
        faults.append('bench/results/plan.csv: the trainer now plans other numbers: update the file with '
                      'tools/figures.py plan PROGRAM')
    if faults:
        raise Failure('\n'.join(faults))


def write_plan(options):
    text = plan_rows(options.program)
    with open(os.path.join(RESULTS, 'plan.csv'), 'w', encoding='utf-8') as file:
        file.write('# Memory that hybrid_train plans on any CUDA device, MiB, by tools/figures.py plan\n' + text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    command = commands.add_parser('check')
    command.add_argument('--hybrid', metavar='PROGRAM')
    command.set_defaults(run=check)
    command = commands.add_parser('plan')
    command.add_argument('program', metavar='PROGRAM')
    command.set_defaults(run=write_plan)
    options = parser.parse_args()
    try:
        options.run(options)
    except (Failure, OSError) as error:
        sys.exit(str(error))


if __name__ == '__main__':
    main()
