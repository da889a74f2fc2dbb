#!/usr/bin/env python3
"""Draws the CSV files that hybrid_train and the benches write:

    python3 tools/plot.py COMMAND ...
    train  -o loss.svg RUN.csv...      loss and held-out loss over tokens
    watch  -o watch.svg RUN.csv...     speed, gradient norm, branch balance and learning rate over tokens
    floor  -o floor.svg BENCH.csv...   time over byte floor, beside the peers
    length -o length.svg BENCH.csv...  time per token over the length of a sequence
    table BENCH.csv...                 Markdown: times beside the fastest peer
    results [FOLDER]                   the figures of README.md, from bench/results
    results-table                      its table

The suffix of FILE in -o FILE is .svg, .png or .pdf.  Rows of BENCH.csv whose impl is gt are ours,
unless --impl names another; other rows of gt, gt_ptx, ref and this package are left out; all else are peers.
An SVG follows the reader's light or dark mode.  The same input gives the same bytes with the same
Matplotlib.  Status: 0 done, 1 a file cannot be read or written, 2 a bad command line.

floor, length and table need rows of both passes, fwd and bwd.  For each operator and dtype, floor and table show the
largest shape that a peer was timed at, or without peers the largest one.  --row 'wkv6 bf16 B8 T4096 H32 N64', which may
be repeated, names shapes instead.  For each operator, length shows the sizes timed at most lengths, or the sizes of
--family 'wkv6 bf16 H32 N64'; a CSV of hybrid_train --bench adds the whole model.

Figures need Matplotlib 3.6 or newer: pip install matplotlib."""
import argparse
import csv
import hashlib
import io
import math
import os
import re
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

OURS = ('gt', 'gt_ptx', 'ref', 'gt_kernels.torch', 'gt_kernels.jax')  # names of this library in results

# The files and rows that README.md shows.
RESULTS = ['bench/results/h200.csv', 'bench/results/h200_peers.csv']
RESULTS_MODEL = 'bench/results/h200_model.csv'
RESULTS_ROWS = [
    'wkv6 bf16 B8 T4096 H32 N64', 'wkv6 f32 B8 T4096 H32 N64',
    'ssd bf16 B8 T4096 H64 P64 N128', 'selective_scan bf16 B8 T4096 D4096 N16',
    'conv1d bf16 B8 T4096 D4352 W4 silu BTD', 'conv1d bf16 B8 T4096 D4352 W4 silu BDT',
    'rmsnorm_linear bf16 M32768 D2048 O8192', 'norm_mix bf16 M32768 D2048',
    'norm_gate bf16 M65536 D512 RMS']
RESULTS_FAMILIES = ['wkv6 bf16 H32 N64', 'ssd bf16 H64 P64 N128', 'selective_scan bf16 N16']
RESULTS_RUNS = {'gains per channel (HY)': 'bench/results/train_hy.csv',
                'gate per token (GF)': 'bench/results/train_gf.csv',
                'projection of both (CP)': 'bench/results/train_cp.csv'}


class Failure(Exception):
    """An error for the user to read; ends the program with status 1."""


# ---- reading -------------------------------------------------------------------------------------

def read_rows(name, columns):
    """The rows of a CSV file as dicts of text, each with its line number under ''.  Lines that
    start with # are comments; all of columns must be there."""
    rows, header = [], None
    try:
        with open(name, encoding='utf-8-sig', newline='') as file:
            for number, line in enumerate(file, 1):
                if not line.strip() or line.startswith('#'):
                    continue
                fields = next(csv.reader([line], strict=True))
                if header is None:
                    header = fields
                    for column in columns:
                        if header.count(column) != 1:
                            how = 'no column' if column not in header else 'more than one column'
                            raise Failure(f"{name}: {how} '{column}' in line {number}")
                    continue
                if len(fields) != len(header):
                    raise Failure(f'{name}: line {number} has {len(fields)} fields, '
                                  f'the header has {len(header)}')
                rows.append({**dict(zip(header, fields)), '': number})
    except OSError as error:
        raise Failure(f'{name}: {error.strerror}') from None
    except UnicodeDecodeError:
        raise Failure(f'{name}: not a text file') from None
    except csv.Error as error:
        raise Failure(f'{name}: line {number}: {error}') from None
    if header is None:
        raise Failure(f'{name}: the file is empty')
    if not rows:
        raise Failure(f'{name}: no rows below the header')
    return rows


def number_in(name, row, column, least=-math.inf):
    """A finite number greater than least."""
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > least):
        what = 'a number' if least < 0 else 'a positive number'
        raise Failure(f"{name}: line {row['']}: column '{column}': '{row[column]}' is not {what}")
    return value


def means(points):
    """Single steps are noisy: means over a fiftieth of the run."""
    width = math.ceil(len(points) / 50) or 1
    parts = [points[i:i + width] for i in range(0, len(points), width)]
    return [tuple(sum(values) / len(part) for values in zip(*part)) for part in parts]


class Run:
    """A training run: tokens and loss of every step, the held-out losses, and the one of the final evaluation."""

    def __init__(self, name):
        self.loss, self.held_out, self.final = [], [], None
        for row in read_rows(name, ['tokens', 'loss', 'held_out']):
            tokens = number_in(name, row, 'tokens', 0)
            if self.loss and tokens <= self.loss[-1][0]:
                raise Failure(f"{name}: line {row['']}: column 'tokens': {row['tokens']} "
                              'is not more than in the row before')
            self.loss.append((tokens, number_in(name, row, 'loss')))
            if row['held_out']:
                self.held_out.append((tokens, number_in(name, row, 'held_out')))
            if row.get('final_loss'):
                self.final = tokens, number_in(name, row, 'final_loss')

    def smooth(self):
        return means(self.loss)


# The panels of watch: column, title, unit or meaning of the numbers.
WATCHED = [('tokens_per_s', 'Speed', 'tokens per second'), ('grad_norm', 'Gradient norm', 'of all, before clipping'),
           ('grad_ratio', 'Branch balance', 'gradient norm of RWKV / Mamba'), ('lr', 'Learning rate', '')]


class Watch:
    """Columns of a run's log other than the loss, each as points over tokens.  A run of one branch has no balance."""

    def __init__(self, name):
        self.points = {column: [] for column, _, _ in WATCHED}
        for row in read_rows(name, ['tokens', *self.points]):
            tokens = number_in(name, row, 'tokens', 0)
            for column, points in self.points.items():
                if column != 'grad_ratio' or row[column]:
                    points.append((tokens, number_in(name, row, column)))


class Bench:
    """Times in ms by (operator, dtype, shape), then by implementation, then by pass."""

    def __init__(self, names, impl):
        self.impl, self.ops, self.times, self.floors = impl, [], {}, {}
        for name in names:
            for row in read_rows(name, ['op', 'pass', 'impl', 'dtype', 'shape', 'ms', 'floor_ms']):
                ms = number_in(name, row, 'ms', 0)
                floor = number_in(name, row, 'floor_ms', 0)
                if row['op'] not in self.ops:
                    self.ops.append(row['op'])
                is_other = row['impl'] in OURS and row['impl'] != impl
                if row['pass'] not in ('fwd', 'bwd') or is_other:
                    continue
                shape = (row['op'], row['dtype'], row['shape'])
                self.times.setdefault(shape, {}).setdefault(row['impl'], {})[row['pass']] = ms
                if row['impl'] == impl:
                    self.floors.setdefault(shape, {})[row['pass']] = floor
        self.shapes = [shape for shape, passes in self.floors.items() if len(passes) == 2]
        if not self.shapes:
            raise Failure(f"{', '.join(names)}: column 'impl': no shape has rows of both passes, "
                          f"fwd and bwd, with '{impl}'")

    def ours(self, shape):
        return self.times[shape][self.impl]

    def peers(self, shape):
        """Who was timed in both passes, the fastest first."""
        peers = [(impl, ms) for impl, ms in self.times[shape].items()
                 if impl != self.impl and len(ms) == 2]
        return sorted(peers, key=lambda peer: sum(peer[1].values()))

    def choose(self, rows):
        """The shapes that rows name; else of each operator and dtype one, if peers were timed."""
        if rows:
            for row in rows:
                if tuple(row.split(' ', 2)) not in self.shapes:
                    raise Failure(f"shape '{row}' does not have rows of both passes, fwd and bwd, "
                                  f"with impl '{self.impl}'")
            return [tuple(row.split(' ', 2)) for row in rows]
        best = {}
        has_peer = {shape[0] for shape in self.shapes if self.peers(shape)}
        for shape in sorted(self.shapes, key=lambda shape: self.ops.index(shape[0])):
            op, dtype, _ = shape
            key = (op, dtype) if op in has_peer else op
            known = best.get(key)
            if op in has_peer and not self.peers(shape):
                continue
            if not known or self.floors[shape]['fwd'] > self.floors[known]['fwd']:
                best[key] = shape
        return list(best.values())


def sizes_of(shape):
    return {letter: int(size) for letter, size in re.findall(r'\b([A-Z])(\d+)\b', shape)}


def without(letters, shape):
    return ' '.join(re.sub(rf'\b[{letters}]\d+\b', '', shape).split())


class Family:
    """Shapes that differ in the length of the sequences and in how many there are at once.  Its lines have the time of
    a token in a head (a channel, where there are no heads), both passes together, in ns."""

    def __init__(self, bench, key, shapes):
        self.op, dtype, words = key.split(' ', 2)
        shapes = sorted(shapes, key=lambda shape: sizes_of(shape[2])['T'])
        first, last = (sizes_of(shape[2]) for shape in (shapes[0], shapes[-1]))
        batches = f"B{first['B']}" + (f" to B{last['B']}" if last['B'] != first['B'] else '')
        self.unit = 'head' if 'H' in first else 'channel'
        self.note = f'{words}, {batches}, {dtype}: ns per token and {self.unit}'
        self.lines = {}
        for shape in shapes:
            n = sizes_of(shape[2])
            work = n['B'] * n['T'] * n['H' if 'H' in n else 'D'] * 1e-6
            fastest = {bench.impl: sum(bench.ours(shape).values())}
            for impl, ms in reversed(bench.peers(shape)):  # of each package its fastest form
                fastest[impl.split()[0]] = sum(ms.values())
            for impl, ms in fastest.items():
                self.lines.setdefault(impl, []).append((n['T'], ms / work))


def families_of(bench, wanted):
    """The families named, as 'wkv6 bf16 H32 N64'; else for each operator the family with most lengths."""
    groups, best = {}, {}
    for shape in sorted(bench.shapes, key=lambda shape: bench.ops.index(shape[0])):
        n = sizes_of(shape[2])
        if 'T' not in n or 'B' not in n or not ('H' in n or 'D' in n):
            continue
        key = ' '.join([*shape[:2], without('BT' if 'H' in n else 'BTD', shape[2])])
        by_length = groups.setdefault(key, {})
        known = by_length.get(n['T'])
        if not known or bench.floors[shape]['fwd'] > bench.floors[known]['fwd']:
            by_length[n['T']] = shape
    groups = {key: list(group.values()) for key, group in groups.items() if len(group) > 1}
    for key, shapes in groups.items():
        op = key.split()[0]
        if op not in best or len(shapes) > len(groups[best[op]]):
            best[op] = key
    for key in wanted or []:
        if key not in groups:
            raise Failure(f"'{key}' has no rows at several lengths with impl '{bench.impl}'")
    if not groups:
        raise Failure(f"no operator has rows at several lengths with impl '{bench.impl}'")
    return [Family(bench, key, groups[key]) for key in wanted or best.values()]


class Model:
    """Curves of a whole model: microseconds per token at each length, in training and in inference."""

    def __init__(self, name):
        self.lines, sizes = {}, set()
        rows = read_rows(name, ['model', 'dtype', 'pass', 'batch', 'seq', 'parameters',
                                'tokens_per_s'])
        for row in rows:
            if row['pass'] not in ('inf', 'fwd+bwd'):  # the others lie close to one of them
                continue
            speed = number_in(name, row, 'tokens_per_s', 0)
            length = number_in(name, row, 'seq', 0)
            sizes.add((row['model'], number_in(name, row, 'parameters', 0), row['batch'],
                       row['dtype']))
            self.lines.setdefault(row['pass'], []).append((length, 1e6 / speed))
        if not sizes:
            raise Failure(f"{name}: column 'pass': there is no row with inf or fwd+bwd")
        if len(sizes) > 1:
            raise Failure(f"{name}: column 'model': the rows have more than one model, batch or dtype")
        model, parameters, batch, dtype = sizes.pop()
        self.note = f'{model}, {parameters * 1e-6:.1f} M parameters, batch {batch}, {dtype}: ' \
                    'us per token'


# ---- drawing -------------------------------------------------------------------------------------

# Each colour in light and in dark mode; a name states the use of its colour.
COLOURS = {
    'paper': ('#ffffff', '#0d1117'), 'ink': ('#1f2328', '#f0f6fc'), 'soft': ('#59636e', '#9198a1'),
    'line': ('#d1d9e0', '#3d444d'), 'peer': ('#818b98', '#8b949e'), 'ours': ('#0969da', '#4493f8'),
    'behind': ('#bc4c00', '#f0883e'), 'third': ('#8250df', '#ab7df8'),
    'fourth': ('#116329', '#3fb950'), 'fifth': ('#bf3989', '#f778ba')}
RUN_COLOURS = ['ours', 'behind', 'third', 'fourth', 'fifth', 'peer']
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def plain(value):
    """Three digits, without an exponent."""
    if value >= 99.5:
        return f'{value:.0f}'
    return f'{value:.1f}' if value >= 9.95 else f'{value:.2f}'


class Picture:
    """A figure of given inches; places are in inches, too, from its upper left corner.  self.drawn lists all that is
    drawn; its digest is in the file's description."""

    def __init__(self, width, height, title):
        try:
            import matplotlib
            from matplotlib import font_manager
            from matplotlib.figure import Figure
        except ImportError as error:
            raise Failure(f'{error}: pip install matplotlib') from None
        matplotlib.rcdefaults()  # neither a user's settings nor a system's fonts
        fonts = font_manager.fontManager
        fonts.ttflist = [f for f in fonts.ttflist if f.fname.startswith(matplotlib.get_data_path())]
        matplotlib.rcParams.update({'svg.fonttype': 'none', 'svg.hashsalt': 'gt_kernels',
                                    'font.size': 9, 'path.simplify': False})
        self.width, self.height, self.title, self.drawn = width, height, title, []
        self.figure = Figure(figsize=(width, height), facecolor=COLOURS['paper'][0])

    def text(self, x, y, text, colour='ink', **more):
        self.figure.text(x / self.width, 1 - y / self.height, text, color=COLOURS[colour][0],
                         parse_math=False, **{'va': 'baseline', **more})

    def axes(self, left, top, width, height, grid):
        """Axes whose grid has lines only along 'x' or only along 'y'."""
        axes = self.figure.add_axes((left / self.width, 1 - (top + height) / self.height,
                                     width / self.width, height / self.height), facecolor='none')
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, labelcolor=COLOURS['soft'][0], labelsize=8)
        axes.grid(axis=grid, color=COLOURS['line'][0], linewidth=.6)
        axes.set_axisbelow(True)
        return axes

    def line(self, axes, name, points, colour, width=1.6, **more):
        self.drawn += [f'{name} {x:.6g} {y:.6g}' for x, y in points]
        if points:
            axes.plot(*zip(*points), **{'color': COLOURS[colour][0], 'linewidth': width,
                                        'clip_on': False, **more})

    def dot(self, axes, name, x, y, colour, size=5.5, marker='o'):
        self.line(axes, name, [(x, y)], colour, 0, marker=marker, markersize=size,
                  markeredgecolor=COLOURS['paper'][0], markeredgewidth=.8, zorder=3)

    def label(self, axes, x, y, text, colour, dx=0, dy=0, **more):
        """Text beside a point of the axes, moved by points (1/72 inch)."""
        axes.annotate(text, (x, y), (dx, dy), textcoords='offset points', annotation_clip=False,
                      color=COLOURS[colour][0], parse_math=False, **{'va': 'center', **more})

    def make_room(self):
        """Widens the paper until all labels fit; the drawing keeps its size."""
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        renderer = FigureCanvasAgg(self.figure).get_renderer()
        texts = self.figure.texts + [text for axes in self.figure.axes for text in axes.texts]
        with matplotlib.rc_context({'text.hinting': 'none'}):  # else widths are rounded to pixels
            boxes = [text.get_window_extent(renderer) for text in texts]
            boxes += filter(None, [axes.yaxis.get_tightbbox(renderer) for axes in self.figure.axes])
        left = min(box.x0 for box in boxes) / self.figure.dpi
        right = max(box.x1 for box in boxes) / self.figure.dpi
        before = .1 - left if left < 0 else 0
        after = right + .1 - self.width if right > self.width else 0
        if not before and not after:
            return
        old, self.width = self.width, self.width + before + after

        def moved(x):  # places are fractions of the paper
            return (x * old + before) / self.width

        for axes in self.figure.axes:
            place = axes.get_position()
            axes.set_position((moved(place.x0), place.y0, place.width * old / self.width, place.height))
        for text in self.figure.texts:
            text.set_x(moved(text.get_position()[0]))
        self.figure.set_figwidth(self.width)

    def bytes(self, suffix):
        self.make_room()
        digest = hashlib.sha256('\n'.join(self.drawn).encode()).hexdigest()
        out = io.BytesIO()
        metadata = {
            'svg': {'Date': None, 'Title': self.title, 'Description': f'data: sha256 {digest}'},
            'pdf': {'CreationDate': None, 'Title': self.title}, 'png': {'Title': self.title}}
        self.figure.savefig(out, format=suffix, dpi=150, facecolor=COLOURS['paper'][0],
                            metadata=metadata[suffix])
        return follow_mode(out.getvalue().decode()).encode() if suffix == 'svg' else out.getvalue()


def follow_mode(svg):
    """The reader's own fonts, and colours that change with the mode."""
    rules = ''.join(
        f'  [style*="{what}: {light}"] {{{what}: {dark} !important}}\n'
        for light, dark in COLOURS.values() for what in ('fill', 'stroke'))
    style = f'<style>\n@media (prefers-color-scheme: dark) {{\n{rules}}}\n</style>\n'
    head, mark, rest = svg.partition('<defs>')
    if not mark:
        raise Failure('this Matplotlib writes an SVG without <defs>')
    return head + style + mark + rest.replace("'DejaVu Sans'", FONTS)


def log_axis(axis, low, high, ticks=None):
    """Ticks at 1, 2 and 5 times powers of ten, if none are given."""
    from matplotlib.ticker import NullLocator
    ticks = ticks or [m * 10**e for e in range(-6, 10) for m in (1, 2, 5)
                      if low <= m * 10**e <= high]
    axis.axes.set(**{f'{axis.axis_name}scale': 'log', f'{axis.axis_name}lim': (low, high)})
    axis.set_minor_locator(NullLocator())
    axis.set_ticks(ticks, labels=[f'{tick:,g}' for tick in ticks])


def spread(wanted, gap):
    """The nearest places to wanted ones, in their order, that are gap apart."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups = []  # of neighbours: [sum of wanted less offset, count]
    for i in order:
        groups.append([wanted[i], 1])
        while len(groups) > 1:
            (low, n), (high, m) = groups[-2:]
            if low / n + (n + m) / 2 * gap <= high / m:
                break
            groups[-2:] = [[low + high, n + m]]
    places, at = [0] * len(wanted), iter(order)
    for total, count in groups:
        for k in range(count):
            places[next(at)] = total / count + (k - (count - 1) / 2) * gap
    return places


def count_of(tokens):
    for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if tokens >= size:
            return f'{tokens / size:g} {unit}'
    return f'{tokens:g}'


def draw_train(runs, labels):
    if len(runs) > len(RUN_COLOURS):
        raise Failure(f'{len(runs)} runs: a figure shows {len(RUN_COLOURS)} at most')
    p = Picture(8.3, 4.0, 'Loss over tokens')
    p.text(.1, .25, 'Loss over tokens read, nats per byte', weight='bold')
    has_held_out = any(run.held_out for run in runs)
    right = 'Thick: held-out text, with its last loss.' if has_held_out else 'Right: the last one.'
    if any(run.final and run.final != run.held_out[-1] for run in runs if run.held_out):
        right += '  Diamond: all held-out tokens, at the end.'
    p.text(.1, .45, f'Thin: training batches, averaged.  {right}', 'soft')
    axes = p.axes(.4, .75, 5.7, 2.75, 'y')
    ends, shown = [], []
    last = max(run.loss[-1][0] for run in runs)
    for run, label, colour in zip(runs, labels, RUN_COLOURS):
        p.line(axes, label + ' loss', run.smooth(), colour, .8, zorder=2)
        p.line(axes, label + ' held out', run.held_out, colour, 1.8)
        ends.append((run.held_out or run.smooth())[-1])
        if run.final and run.final != ends[-1]:  # more tokens than those of the curve
            p.dot(axes, label + ' final', *run.final, colour, 7, 'D')
            shown.append(run.final[1])
        shown += [y for _, y in run.smooth() + run.held_out]
    low, high = min(shown), max(shown)
    low, high = low - (high - low or 1) * .05, high + (high - low or 1) * .05
    axes.set(xlim=(0, last), ylim=(low, high))
    axes.xaxis.set_major_formatter(lambda tokens, _: count_of(tokens))
    p.text(6.1, 3.9, 'tokens', 'soft', size=8, ha='right')
    places = spread([y for _, y in ends], (high - low) * .065)
    for run, place, (x, y), label, colour in zip(runs, places, ends, labels, RUN_COLOURS):
        final = f' ({run.final[1]:.3f})' if run.final and run.final != (x, y) else ''
        p.dot(axes, label + ' end', x, y, colour)
        p.label(axes, last, place, f'{y:.3f}{final}  {label}', colour, 8)
    return p


def draw_watch(runs, labels):
    if len(runs) > len(RUN_COLOURS):
        raise Failure(f'{len(runs)} runs: a figure shows {len(RUN_COLOURS)} at most')
    wide, high, top = 3.3, 1.5, 1.05
    p = Picture(8.3, 5.4, 'Training runs')
    p.text(.1, .25, 'Training runs, over tokens read', weight='bold')
    legend = p.axes(.1, .37, 8, .2, 'x')
    legend.set(xlim=(0, 8), ylim=(0, 1), xticks=[], yticks=[])
    for i, (label, colour) in enumerate(zip(labels, RUN_COLOURS)):
        p.dot(legend, label, .05 + 8 / len(labels) * i, .5, colour)
        p.label(legend, .05 + 8 / len(labels) * i, .5, label, 'soft', 7, size=8)
    last = max(points[-1][0] for run in runs for points in run.points.values() if points)
    for i, (column, title, unit) in enumerate(WATCHED):
        left, y = .5 + i % 2 * (wide + .7), top + i // 2 * (high + .8)
        p.text(left - .35, y - .1, title, weight='bold')
        p.text(left + 1.05, y - .1, unit, 'soft', size=7.5)
        axes = p.axes(left, y, wide, high, 'y')
        for run, label, colour in zip(runs, labels, RUN_COLOURS):
            points = run.points[column]
            p.line(axes, f'{label} {column}', points if column == 'lr' else means(points), colour, 1.2)
        axes.set(xlim=(0, last))
        axes.xaxis.set_major_formatter(lambda tokens, _: count_of(tokens))
        axes.yaxis.set_major_formatter(lambda value, _: count_of(value) if value >= 1 else f'{value:g}')
        if not any(run.points[column] for run in runs):
            p.label(axes, last / 2, .5, 'only one branch', 'soft', size=8, ha='center')
    return p


def draw_floor(bench, shapes):
    step, top, left, wide, gap = .46, 1.05, 2.05, 2.75, .5
    p = Picture(8.3, top + step * len(shapes) + .3, 'Time over the byte floor')
    p.text(.1, .25, 'Time over the byte floor', weight='bold')
    p.text(.1, .45, 'At 1 a call takes as long as memory needs to copy its inputs and outputs '
           'once.  Left is faster.', 'soft')
    legend = p.axes(.1, .57, 8, .1, 'x')
    legend.set(xlim=(0, 8), ylim=(0, 1), xticks=[], yticks=[])
    for x, colour, size, text in ((.05, 'ours', 7, 'these kernels, ahead of all peers'),
                                  (2.4, 'behind', 7, 'these kernels, behind'),
                                  (4.05, 'peer', 5.5, 'the fastest peer, named'),
                                  (5.85, 'peer', 3.2, 'other peers')):
        p.dot(legend, text, x, .5, colour, size)
        p.label(legend, x, .5, text, 'soft', 7, size=8)
    p.text(left + .07, .95, 'forward', weight='bold')
    p.text(left + wide + gap + .07, .95, 'backward', weight='bold')
    for row, (op, dtype, shape) in enumerate(shapes):
        y = top + step * (row + .5)
        p.text(.1, y - .03, op, weight='bold')
        p.text(.1, y + .13, f'{shape}, {dtype}', 'soft', size=7.5)
    ratios = [ms[which] / bench.floors[shape][which] for shape in shapes
              for ms in [bench.ours(shape)] + [ms for _, ms in bench.peers(shape)] for which in ms]
    for column, which in enumerate(('fwd', 'bwd')):
        axes = p.axes(left + column * (wide + gap), top, wide, step * len(shapes), 'x')
        axes.set(ylim=(len(shapes), 0), yticks=[])
        for row, shape in enumerate(shapes):
            draw_dots(p, axes, bench, shape, which, row + .5)
        log_axis(axes.xaxis, min(.8, .8 * min(ratios)), 1.3 * max(ratios))
    return p


def draw_dots(p, axes, bench, shape, which, y):
    """A shape in one pass."""
    name, floor = ' '.join((which,) + shape), bench.floors[shape][which]
    ours = bench.ours(shape)[which] / floor
    peers = sorted((ms[which] / floor, impl) for impl, ms in bench.peers(shape))
    is_behind = bool(peers) and peers[0][0] < ours
    colour = 'behind' if is_behind else 'ours' if peers else 'ink'
    if peers:
        best, impl = peers[0]
        p.line(axes, name, [(ours, y), (best, y)], colour)
        for ratio, other in peers[1:]:
            p.dot(axes, f'{name} {other}', ratio, y, 'peer', 3.2)
        p.dot(axes, f'{name} {impl}', best, y, 'peer')
        side, shift = ('left', -3) if best < 4 else ('center', 0)
        p.label(axes, best, y, f'{plain(best)}  {impl}', 'soft', shift, 9, size=7.5, ha=side)
    p.dot(axes, name + ' ours', ours, y, colour, 7)
    p.label(axes, ours, y, plain(ours), colour, 7 if is_behind else -7, size=8,
            ha='left' if is_behind else 'right')
    if not peers:
        p.label(axes, ours, y, 'no peer was timed', 'soft', 7, size=7.5)


def draw_length(bench, families, model):
    panels = [(f.op, f.note, f.lines) for f in families]
    if model:
        panels.append(('whole model', model.note, model.lines))
    wide, high, gap, top = 2.6, 1.35, 1.55, 1.15
    step = high + .95
    p = Picture(8.3, top + step * ((len(panels) + 1) // 2) - .6, 'Time per token over length')
    p.text(.1, .25, 'Time per token over the length of a sequence', weight='bold')
    p.text(.1, .45, 'Forward and backward together.  A level line: twice the length takes twice '
           'the time.', 'soft')
    for i, (title, note, lines) in enumerate(panels):
        left, y = .4 + i % 2 * (wide + gap), top + i // 2 * step
        p.text(left - .3, y - .29, title, weight='bold')
        p.text(left - .3, y - .12, note, 'soft', size=7.5)
        axes = p.axes(left, y, wide, high, 'y')
        draw_lines(p, axes, title, lines, bench.impl if bench else None)
    return p


def is_slower(line, other):
    """At the greatest length that both have."""
    line, other = dict(line), dict(other)
    common = max(line.keys() & other.keys(), default=None)
    return common is not None and line[common] > other[common]


def draw_lines(p, axes, title, lines, impl):
    values = [y for line in lines.values() for _, y in line]
    lengths = sorted({x for line in lines.values() for x, _ in line})
    low, high = min(values) / 1.25, max(values) * 1.25
    log_axis(axes.yaxis, low, high)
    log_axis(axes.xaxis, lengths[0], lengths[-1], lengths)
    ours = [name for name in (impl, 'fwd+bwd', 'inf') if name in lines]
    peers = [name for name in lines if name not in ours]
    is_behind = bool(ours) and any(is_slower(lines[ours[0]], lines[name]) for name in peers)
    names = peers + ours
    ends = spread([math.log(lines[name][-1][1]) for name in names], math.log(high / low) * .13)
    for name, end in zip(names, ends):
        x, y = lines[name][-1]
        colour = 'peer' if name in peers else 'behind' if is_behind else 'ours'
        p.line(axes, f'{title} {name}', lines[name], colour, 1.8, marker='o', markersize=3.5)
        text = {impl: 'here', 'fwd+bwd': 'both', 'inf': 'forward'}.get(name, name)
        p.label(axes, x, math.exp(end), f'{plain(y)}  {text}',
                'soft' if colour == 'peer' else colour, 7, size=8)


# ---- table ---------------------------------------------------------------------------------------

def speed(ratio):
    """(digits, words) of how many times faster."""
    factor = max(ratio, 1 / ratio)
    words = 'times faster' if ratio >= 1 else 'times slower'
    return f'{factor:.{1 if factor < 9.95 else 0}f}', words


def speed_range(bench, shape):
    """Against the fastest peer of each pass, in all shapes of the operator, dtype and layout."""
    def kind(shape):
        return shape[:2], re.sub(r'\b[A-Z]\d+\b', '', shape[2]).split()

    ratios = [min(ms[which] for _, ms in bench.peers(other)) / bench.ours(other)[which]
              for other in bench.shapes if kind(other) == kind(shape) and bench.peers(other)
              for which in ('fwd', 'bwd')]
    low, high = sorted([speed(min(ratios)), speed(max(ratios))], key=lambda s: float(s[0]))
    if low[1] == high[1]:
        return f'{low[0]} to {high[0]} {low[1]}'
    low, high = speed(min(ratios)), speed(max(ratios))
    return f'{low[0]} {low[1]} to {high[0]} {high[1]}'


def table(bench, shapes):
    """A table in Markdown.  A row has our times and those of the peer with the smallest sum of both passes, the ratio of
    the sums, and a range of ratios.  The range is over all shapes of the operator, dtype and layout, and compares each
    pass with the fastest peer of that pass."""
    def times(ms):
        return ' / '.join(f"{ms[which]:.{3 if ms[which] < 1 else 2}f}" for which in ('fwd', 'bwd'))

    lines = ['| operator, shape, dtype | here, ms | fastest peer | its ms | forward + backward '
             '| each pass, all shapes |', '|---|---|---|---|---|---|']
    for shape in shapes:
        op, dtype, text = shape
        ours, peers = bench.ours(shape), bench.peers(shape)
        peer = ['none was timed', '', '', '']
        if peers:
            impl, ms = peers[0]
            ratio = ' '.join(speed(sum(ms.values()) / sum(ours.values())))
            peer = [impl, times(ms), f'**{ratio}**' if 'slower' in ratio else ratio,
                    speed_range(bench, shape)]
        lines.append('| ' + ' | '.join([f'`{op}` {text}, {dtype}', times(ours), *peer]) + ' |')
    return '\n'.join(lines) + '\n'


# ---- command line --------------------------------------------------------------------------------

def suffix_of(name):
    suffix = os.path.splitext(name)[1][1:]
    if suffix not in ('svg', 'png', 'pdf'):
        raise argparse.ArgumentTypeError(f"'{name}' does not end in .svg, .png or .pdf")
    return name


def mode_of(name):
    """The permissions that a file has, or that a new one gets."""
    if os.path.exists(name):
        return os.stat(name).st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write(name, picture, inputs=()):
    """Writes beside the file first, under a name that no file has, so that a failure leaves the old file."""
    beside = None
    try:
        if os.path.exists(name) and any(os.path.samefile(name, other) for other in inputs):
            raise Failure(f'{name}: is an input, and would be overwritten; give another name')
        image = picture.bytes(os.path.splitext(name)[1][1:])
        handle, beside = tempfile.mkstemp(prefix=os.path.basename(name) + '.', dir=os.path.dirname(name) or '.')
        with open(handle, 'wb') as file:
            file.write(image)
        os.chmod(beside, mode_of(name))
        os.replace(beside, name)
        beside = None
    except OSError as error:
        raise Failure(f'{name}: {error.strerror}') from None
    finally:
        if beside:
            os.remove(beside)


def print_text(text):
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = None  # nothing more to flush at the end
        raise Failure(f'standard output: {error.strerror}') from None


def path(name):
    return os.path.join(ROOT, name)


def draw_results(bench, folder):
    """The three figures of README.md."""
    pictures = {
        'floor.svg': draw_floor(bench, bench.choose(RESULTS_ROWS)),
        'length.svg': draw_length(bench, families_of(bench, RESULTS_FAMILIES),
                                  Model(path(RESULTS_MODEL))),
        'train.svg': draw_train([Run(path(name)) for name in RESULTS_RUNS.values()],
                                list(RESULTS_RUNS))}
    for name, picture in pictures.items():
        write(os.path.join(folder, name), picture)


def is_model(name):
    """Whether a CSV file is of hybrid_train --bench."""
    try:
        with open(name, encoding='utf-8') as file:
            heads = (line for line in file if line.strip() and not line.startswith('#'))
            return next(heads, '').startswith('model,')
    except (OSError, UnicodeDecodeError):
        return False  # a later read says why


def parse_options():
    parser = argparse.ArgumentParser(prog='plot.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name in ('train', 'watch', 'floor', 'length', 'table'):
        command = commands.add_parser(name)
        command.add_argument('files', metavar='FILE.csv', nargs='+')
        if name != 'table':
            command.add_argument('-o', dest='output', metavar='FILE', required=True,
                                 type=suffix_of)
        if name in ('train', 'watch'):
            command.add_argument('--label', action='append', metavar='TEXT',
                                 help='name of a run in the figure, once for each file, in the same order; '
                                      'default: names of the files')
        else:
            command.add_argument('--impl', default='gt', metavar='NAME',
                                 help='the impl that is compared with the peers')
        if name in ('floor', 'table'):
            command.add_argument('--row', action='append', metavar='TEXT',
                                 help="a shape to show: 'OPERATOR DTYPE SHAPE'")
        if name == 'length':
            command.add_argument('--family', action='append', metavar='TEXT',
                                 help="sizes to show: 'OPERATOR DTYPE SIZES'")
    command = commands.add_parser('results')
    command.add_argument('folder', nargs='?', default=path('docs/figures'))
    commands.add_parser('results-table')
    options = parser.parse_args()
    if options.command in ('train', 'watch') and options.label and len(options.label) != len(options.files):
        parser.error(f'--label is given {len(options.label)} times, but there are {len(options.files)} files')
    return options


def run(options):
    if options.command.startswith('results'):
        bench = Bench([path(name) for name in RESULTS], 'gt')
        if options.command == 'results':
            return draw_results(bench, options.folder)
        return print_text(table(bench, bench.choose(RESULTS_ROWS)))
    if options.command in ('train', 'watch'):
        labels = options.label or [os.path.splitext(os.path.basename(f))[0] for f in options.files]
        read, draw = (Run, draw_train) if options.command == 'train' else (Watch, draw_watch)
        picture = draw([read(name) for name in options.files], labels)
    elif options.command == 'length':
        models = [name for name in options.files if is_model(name)]
        benches = [name for name in options.files if name not in models]
        if len(models) > 1:
            raise Failure(f'{models[1]}: a figure can show only one model')
        bench = Bench(benches, options.impl) if benches else None
        picture = draw_length(bench, families_of(bench, options.family) if bench else [],
                              Model(models[0]) if models else None)
    else:
        bench = Bench(options.files, options.impl)
        shapes = bench.choose(options.row)
        if options.command == 'table':
            return print_text(table(bench, shapes))
        picture = draw_floor(bench, shapes)
    write(options.output, picture, options.files)


def main():
    options = parse_options()
    try:
        run(options)
    except Failure as failure:
        print(f'plot.py: {failure}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
