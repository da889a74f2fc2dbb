"""tools/plot.py, run on what hybrid_train writes, on small tables and on the results in bench/results: what it draws,
that bad input leaves nothing but a message, and that README.md and docs/figures show the results of today.

    test_plot.py HYBRID_TRAIN"""
import csv
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

try:
    import matplotlib
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
except ImportError as error:
    print(f'skipped: {error}')
    sys.exit(1 if os.environ.get('GT_TEST_STRICT') else 77)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLOT = os.path.join(ROOT, 'tools/plot.py')
SVG = '{http://www.w3.org/2000/svg}'
TRAIN_HEAD = 'step,tokens,loss,held_out\n'
BENCH_HEAD = 'op,pass,impl,dtype,shape,ms,floor_ms,rel_err,mem_mib\n'
MODEL_HEAD = 'model,device,dtype,pass,batch,seq,parameters,tokens_per_s\n'
hybrid_train = None


def bench_rows(*times):
    """Rows of wkv6 from (impl, shape, ms of fwd, ms of bwd); the floors are 1 and 2 ms."""
    return BENCH_HEAD + ''.join(
        f'wkv6,{p},{impl},bf16,{shape},{ms},{floor},nan,0\n'
        for impl, shape, *both in times for p, ms, floor in zip(('fwd', 'bwd'), both, (1, 2)))


def places(svg, colour):
    """(x, y) of the dots of a colour."""
    return [(float(use.get('x')), float(use.get('y')))
            for use in xml.fromstring(svg).iter(SVG + 'use') if f'fill: {colour}' in use.get('style', '')]


def texts(svg):
    return [' '.join(text.itertext()) for text in xml.fromstring(svg).iter(SVG + 'text')]


class PlotTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.chdir(folder.name)
        self.addCleanup(os.chdir, ROOT)

    def plot(self, *arguments, status=0, **more):
        result = subprocess.run([sys.executable, PLOT, *arguments], capture_output=True, text=True, **more)
        self.assertEqual(result.returncode, status, f'{arguments}: {result.stdout}{result.stderr}')
        if status == 0:
            self.assertEqual(result.stderr, '')
        return result.stderr if status else result.stdout

    def put(self, name, text):
        with open(name, 'w', encoding='latin-1') as file:
            file.write(text)
        return name

    def get(self, name):
        with open(name, encoding='utf-8') as file:
            return file.read()

    def refuses(self, *words, command, files, output='out.svg'):
        """With status 1 and one line that holds all words; neither output nor anything else appears."""
        before = sorted(os.listdir())
        message = self.plot(command, *files, *(['-o', output] if output else []), status=1)
        self.assertEqual(message.count('\n'), 1, message)
        for word in ('plot.py: ',) + words:
            self.assertIn(word, message)
        self.assertEqual(sorted(os.listdir()), before)

    # ---- drawings --------------------------------------------------------------------------------

    def test_draws_runs_of_hybrid_train(self):
        for seed in ('1', '2'):
            subprocess.run([hybrid_train, '--steps', '60', '--batch', '2', '--seq', '16', '--hidden', '32',
                            '--layers', '1', '--eval-every', '10', '--eval-tokens', '64', '--sample', '0', '--device', 'cpu', '--seed', seed,
                            '--csv', f'run{seed}.csv'], check=True, capture_output=True)
        self.plot('train', '-o', 'loss.svg', 'run1.csv', 'run2.csv', '--label', 'one & two', '--label', 'three')
        shown = texts(self.get('loss.svg'))
        for name, label in (('run1.csv', 'one & two'), ('run2.csv', 'three')):
            rows = list(csv.DictReader(self.get(name).splitlines()))
            last = [float(row['held_out']) for row in rows if row['held_out']]
            self.assertEqual((len(rows), len(last)), (60, 6))
            self.assertNotEqual(float(rows[-1]['final_loss']), last[-1])  # on all tokens, and so drawn apart
            self.assertIn(f"{last[-1]:.3f} ({float(rows[-1]['final_loss']):.3f})  {label}", shown)
        self.plot('train', '-o', 'again.svg', 'run1.csv', 'run2.csv', '--label', 'one & two', '--label', 'three')
        self.assertEqual(self.get('loss.svg'), self.get('again.svg'))
        for name, start in (('loss.png', b'\x89PNG'), ('loss.pdf', b'%PDF')):
            self.plot('train', '-o', name, 'run1.csv')
            with open(name, 'rb') as file:
                self.assertTrue(file.read().startswith(start))

    def test_a_loss_lies_where_it_belongs(self):
        rows = [f'{i},{100 * i},{8 - .06 * i},{9 - .07 * i if i % 10 == 0 else ""}\n' for i in range(1, 101)]
        self.plot('train', '-o', 'loss.svg', self.put('run.csv', TRAIN_HEAD + ''.join(rows)))
        lines = {}
        for path in xml.fromstring(self.get('loss.svg')).iter(SVG + 'path'):
            style = path.get('style', '')
            if 'stroke: #0969da' in style and 'fill: none' in style:
                self.assertIsNone(path.get('clip-path'))  # drawn from its first point to its last
                width = re.search(r'stroke-width: ([\d.]+)', style)[1]
                lines[width] = [tuple(map(float, p)) for p in re.findall(r'[ML] (\S+) (\S+)', path.get('d'))]
        thin, thick = lines['0.8'], lines['1.8']
        self.assertEqual((len(thin), len(thick)), (50, 10))
        # both curves begin with their highest point, below the words at the top, and end with the lowest, on the paper
        for curve in (thin, thick):
            self.assertEqual([curve[0][1], curve[-1][1]], [min(y for _, y in curve), max(y for _, y in curve)])
            self.assertGreater(curve[0][1], .7 * 72)
            self.assertLess(curve[-1][1], 3.6 * 72)
        # thin: means of two steps, from token 150 with loss 7.91 to token 9950 with 2.03; thick: from 1000 with 8.3 to
        # 10000 with 2
        per_token = (thin[-1][0] - thin[0][0]) / 9800
        per_nat = (thin[-1][1] - thin[0][1]) / (7.91 - 2.03)
        self.assertGreater(per_nat, 0)  # y grows downwards
        for (tokens, loss), (x, y) in zip([(1000 * i, 9 - .7 * i) for i in range(1, 11)], thick):
            self.assertAlmostEqual(x, thin[0][0] + (tokens - 150) * per_token, delta=.1)
            self.assertAlmostEqual(y, thin[0][1] + (7.91 - loss) * per_nat, delta=.1)

    def test_long_labels_fit_on_the_paper(self):
        long = 'a label that names all that was changed: lr 0.004, GF, 64 channels, W' + 'M' * 40
        self.put('run.csv', TRAIN_HEAD + '1,10,3,\n2,20,2.5,2\n')
        self.put('bench.csv', bench_rows(*((name, f'B1 T{t} H1 N64', ms, ms) for t in (1000, 2000)
                                           for name, ms in (('gt', 1), ('p' * 90, 9)))))
        for command, file, more, name in (('train', 'run.csv', ['--label', long], long),
                                          ('floor', 'bench.csv', [], 'p' * 90), ('length', 'bench.csv', [], 'p' * 90)):
            self.plot(command, '-o', 'out.svg', file, *more)
            tree = xml.fromstring(self.get('out.svg'))
            width = float(tree.get('viewBox').split()[2])
            self.assertGreater(width, 8.3 * 72)
            self.assertTrue(any(name in text for text in texts(self.get('out.svg'))))
            for element in tree.iter(SVG + 'text'):
                style, text = element.get('style', ''), ' '.join(element.itertext())
                size = float(re.search(r'([\d.]+)px', style)[1])
                left = float(element.get('x') or re.search(r'translate\((\S+)', element.get('transform'))[1])
                font = FontProperties(family='DejaVu Sans', weight='bold' if 'bold' in style else 'normal')
                wide = TextPath((0, 0), text.replace('$', ''), size=size, prop=font).get_extents().x1
                anchor = re.search(r'text-anchor: (\w+)', style)
                left -= {'middle': wide / 2, 'end': wide}.get(anchor and anchor[1], 0)
                self.assertGreaterEqual(left, 0, text)
                self.assertLessEqual(left + wide, width, text)

    def test_the_final_loss_stands_apart(self):
        head, rows = 'tokens,loss,held_out,final_loss,final_tokens\n', ['10,3,3,,', '20,2,2,2.5,100']
        self.plot('train', '-o', 'apart.svg', self.put('run.csv', head + '\n'.join(rows) + '\n'))
        rows[1] = '20,2,2,2,100'
        self.plot('train', '-o', 'same.svg', self.put('same.csv', head + '\n'.join(rows) + '\n'))
        apart, same = self.get('apart.svg'), self.get('same.svg')
        self.assertIn('2.000 (2.500)  run', texts(apart))
        self.assertIn('2.000  same', texts(same))
        self.assertEqual(len(places(apart, '#0969da')), len(places(same, '#0969da')) + 1)
        self.assertTrue(any('Diamond' in text for text in texts(apart)))
        self.assertFalse(any('Diamond' in text for text in texts(same)))

    def test_watches_runs(self):
        head = 'tokens,tokens_per_s,grad_norm,grad_ratio,lr\n'
        self.put('one.csv', head + ''.join(f'{i},{1000 + i},1.5,0.5,{i / 1000}\n' for i in range(1, 90)))
        self.put('two.csv', head + ''.join(f'{i},{2000 + i},2.5,,{i / 1000}\n' for i in range(1, 90)))
        self.plot('watch', '-o', 'both.svg', 'one.csv', 'two.csv')
        shown = texts(self.get('both.svg'))
        for text in ('Speed', 'Gradient norm', 'Branch balance', 'Learning rate', 'one', 'two'):
            self.assertIn(text, shown)
        lines = [path.get('style') for path in xml.fromstring(self.get('both.svg')).iter(SVG + 'path')]
        for colour, count in (('#0969da', 4), ('#bc4c00', 3)):  # the second run has no balance
            self.assertEqual(sum(f'stroke: {colour}' in (style or '') and 'fill: none' in style for style in lines),
                             count)
        self.plot('watch', '-o', 'alone.svg', 'two.csv')
        self.assertIn('only one branch', texts(self.get('alone.svg')))
        self.refuses("no column 'lr'", command='watch', files=[self.put('bad.csv', 'tokens,grad_norm,tokens_per_s,'
                                                                        'grad_ratio\n1,2,3,4\n')])

    def test_a_run_without_held_out_losses(self):
        self.put('run.csv', TRAIN_HEAD + '1,10,3,\n2,20,2.5,\n')
        self.plot('train', '-o', 'loss.svg', 'run.csv', '--label', '$x_{')
        self.assertIn('2.500  $x_{', texts(self.get('loss.svg')))  # no formula
        self.plot('train', '-o', 'loss.svg', self.put('one.csv', TRAIN_HEAD + '1,10,3,\n'))
        self.plot('train', '-o', 'loss.svg', self.put('two.csv', '\xef\xbb\xbf' + 'tokens,loss,held_out\r\n1,3,\r\n'))

    def test_a_time_lies_where_it_belongs(self):
        shapes = [f'B1 T{t} H1 N64' for t in (100, 200, 300)]
        self.put('bench.csv', bench_rows(*(('gt', s, ms, 4 * ms) for s, ms in zip(shapes, (1, 10, 100)))))
        self.put('peers.csv', bench_rows(('slow', shapes[0], 30, 40), ('quick', shapes[1], 5, 8),
                                         ('slow', shapes[1], 6, 9)))
        rows = sum((['--row', f'wkv6 bf16 {s}'] for s in shapes), [])
        self.plot('floor', '-o', 'floor.svg', 'bench.csv', 'peers.csv', *rows)
        svg = self.get('floor.svg')
        legend, ahead, ahead_backward = places(svg, '#0969da')
        _, behind, behind_backward = places(svg, '#bc4c00')
        alone, alone_backward = places(svg, '#1f2328')
        self.assertAlmostEqual(behind[0] - ahead[0], alone[0] - behind[0], delta=.01)  # 1, 10 and 100
        self.assertAlmostEqual(behind[1] - ahead[1], alone[1] - behind[1], delta=.01)
        for forward, backward in ((ahead, ahead_backward), (behind, behind_backward), (alone, alone_backward)):
            self.assertEqual(forward[1], backward[1])
        self.assertAlmostEqual(behind_backward[0] - ahead_backward[0], alone_backward[0] - behind_backward[0],
                               delta=.01)  # 2, 20 and 200 times the floor of 2 ms
        decade = behind[0] - ahead[0]
        self.assertAlmostEqual(behind_backward[0] - ahead_backward[0], decade, delta=.01)  # one scale
        peers = [x - ahead[0] for x, y in places(svg, '#818b98') if ahead[0] <= x <= alone[0] and y >= ahead[1]]
        for ratio in (30, 5, 6):
            self.assertTrue(any(abs(x - decade * math.log10(ratio)) < .01 for x in peers), (ratio, peers, decade))
        shown = texts(svg)
        for text in ('1.00', '10.0', '100', '2.00', '20.0', '200', '30.0  slow', '5.00  quick', '4.00  quick',
                     'no peer was timed'):
            self.assertIn(text, shown)

    def test_a_cost_per_token_lies_where_it_belongs(self):
        # 1 + 1, 4 + 4 and 16 + 16 ms for 1000, 2000 and 4000 tokens in 2 heads: 1000, 2000 and 4000 ns
        ours = [('gt', f'B1 T{t} H2 N64', ms, ms) for t, ms in ((1000, 1), (4000, 16), (2000, 4))]
        peers = [(f'a {form}', f'B1 T{t} H2 N64', ms, 1) for t in (1000, 2000) for form, ms in (('x', 2), ('y', 3))]
        peers += [('b', 'B1 T1000 H2 N64', 4, 4)]  # slower, at the length that both have
        self.put('bench.csv', bench_rows(*ours, *peers))
        self.put('model.csv', MODEL_HEAD + 'HY,cpu,f32,inf,8,64,1000,1e6\nHY,cpu,f32,inf,8,128,1000,5e5\n'
                 'HY,cpu,f32,step,8,64,1000,1e5\nHY,cpu,f32,step,8,128,1000,1e5\n')
        self.plot('length', '-o', 'length.svg', 'bench.csv', 'model.csv')
        svg = self.get('length.svg')
        dots = places(svg, '#bc4c00')  # behind a
        self.assertEqual(len(dots), 3)
        for axis in (0, 1):
            self.assertAlmostEqual(dots[1][axis] - dots[0][axis], dots[2][axis] - dots[1][axis], delta=.01)
        shown = texts(svg)
        for text in ('4000  here', '750  a', '4000  b', '2.00  forward', '4,000',
                     'H2 N64, B1, bf16: ns per token and head'):
            self.assertIn(text, shown)  # of a's forms the faster one, (2 + 1) / 4000
        self.put('bench.csv', bench_rows(*ours, peers[-1]))
        self.plot('length', '-o', 'length.svg', 'bench.csv')
        self.assertEqual((len(places(self.get('length.svg'), '#0969da')), len(peers)), (3, 5))

    def test_table(self):
        self.put('bench.csv', bench_rows(
            ('gt', 'B1 T1 H1 N64', .5, 1.5), ('p', 'B1 T1 H1 N64', 2, 4), ('q', 'B1 T1 H1 N64', 1, 1e9),
            ('gt', 'B1 T1 H1 N32', 1, 1), ('ref', 'B1 T1 H1 N32', .1, .1), ('p', 'B1 T1 H1 N32', 1, 9.61)))
        head, _, row = self.plot('table', '--row', 'wkv6 bf16 B1 T1 H1 N64', 'bench.csv').splitlines()
        self.assertEqual(head.count('|'), row.count('|'))
        self.assertEqual(row, '| `wkv6` B1 T1 H1 N64, bf16 | 0.500 / 1.50 | p | 2.00 / 4.00 | 3.0 times faster '
                              '| 1.0 to 9.6 times faster |')
        slow = self.put('two.csv', bench_rows(
            ('ref', 'B1 T1 H1 N64 z', 1, 1), ('q', 'B1 T1 H1 N64 z', .5, .25), ('gt', 'B1 T1 H1 N64 z', .1, .1),
            ('ref', 'B1 T1 H1 N64', 1, 1), ('q', 'B1 T1 H1 N64', 100, .01), ('gt_ptx', 'B1 T1 H1 N64', .1, .1),
            ('gt_kernels.torch', 'B1 T1 H1 N64', .1, .1)))
        row = self.plot('table', '--impl', 'ref', slow, '--row', 'wkv6 bf16 B1 T1 H1 N64 z')
        self.assertIn('| q | 0.500 / 0.250 | **2.7 times slower** | 2.0 to 4.0 times slower |', row)
        row = self.plot('table', '--impl', 'ref', slow, '--row', 'wkv6 bf16 B1 T1 H1 N64')
        self.assertIn('| 50 times faster | 100 times slower to 100 times faster |', row)
        alone = self.put('alone.csv', bench_rows(('gt', 'B1 T1 H1 N64', 20, 30)))
        self.assertIn('| 20.00 / 30.00 | none was timed |  |  |  |', self.plot('table', alone))

    # ---- bad input -------------------------------------------------------------------------------

    def test_files_that_cannot_be_read(self):
        for command, head in (('train', TRAIN_HEAD), ('floor', BENCH_HEAD), ('length', BENCH_HEAD)):
            self.refuses('none.csv', 'No such file', command=command, files=['none.csv'])
            self.refuses('empty.csv', 'empty', command=command, files=[self.put('empty.csv', '')])
            self.refuses('comment.csv', 'empty', command=command, files=[self.put('comment.csv', '# nothing\n')])
            self.refuses('head.csv', 'no rows', command=command, files=[self.put('head.csv', head)])
            self.refuses('short.csv', 'line 2', command=command, files=[self.put('short.csv', head + '1,2\n')])
            self.refuses('binary.csv', 'not a text', command=command, files=[self.put('binary.csv', head + '\xff\n')])
            self.refuses(ROOT, 'directory', command=command, files=[ROOT])
        self.refuses('none.csv', command='table', files=['none.csv'], output=None)

    def test_columns_that_are_missing_or_wrong(self):
        for command, head, row, needed in (
                ('train', TRAIN_HEAD, '1,100,2.5,\n', ['tokens', 'loss', 'held_out']),
                ('floor', BENCH_HEAD, 'wkv6,fwd,gt,bf16,B1 T1,1,1,0,0\n',
                 ['op', 'pass', 'impl', 'dtype', 'shape', 'ms', 'floor_ms']),
                ('length', MODEL_HEAD, 'HY,cpu,f32,inf,8,64,1000,1e6\n',
                 ['dtype', 'pass', 'batch', 'seq', 'parameters', 'tokens_per_s'])):
            names = head.strip().split(',')
            for column in needed:
                other = ','.join('other' if name == column else name for name in names) + '\n'
                self.refuses('bad.csv', f"no column '{column}'", command=command,
                             files=[self.put('bad.csv', other + row)])
            twice = head.strip() + f',{needed[-1]}\n' + row.strip() + ',1\n'
            self.refuses('bad.csv', 'more than one', needed[-1], command=command, files=[self.put('bad.csv', twice)])
            for column in set(needed) & {'tokens', 'loss', 'held_out', 'ms', 'floor_ms', 'seq', 'tokens_per_s'}:
                for value in ('x', 'nan', 'inf', '-1e400'):
                    fields = row.strip().split(',')
                    fields[names.index(column)] = value
                    self.refuses('bad.csv: line 3', f"'{column}'", f"'{value}'", command=command,
                                 files=[self.put('bad.csv', '# \n' + head + ','.join(fields) + '\n')])
        for value in ('0', '-1'):
            self.refuses('line 2', "'ms'", 'positive', command='floor',
                         files=[self.put('bad.csv', BENCH_HEAD + f'wkv6,fwd,gt,bf16,B1 T1,{value},1,0,0\n')])
        self.refuses('line 3', "'tokens'", command='train',
                     files=[self.put('bad.csv', TRAIN_HEAD + '1,100,2,\n2,100,2,\n')])

    def test_rows_that_are_not_there(self):
        self.put('bench.csv', bench_rows(('gt', 'B1 T1 H1 N64', 1, 1)))
        self.refuses("'gt'", 'bench.csv', command='floor', files=[self.put('forward.csv', bench_rows(
            ('gt', 'B1 T1 H1 N64', 1))), self.put('bench.csv', bench_rows(('peer', 'B1 T1 H1 N64', 1, 1)))])
        self.put('bench.csv', bench_rows(('gt', 'B1 T1 H1 N64', 1, 1)))
        self.refuses("'ssd bf16 B1'", command='floor', files=['bench.csv', '--row', 'ssd bf16 B1'])
        self.refuses("'wkv6 bf16 H9'", command='length', files=['bench.csv', '--family', 'wkv6 bf16 H9'])
        self.refuses('several lengths', command='length', files=['bench.csv'])
        self.refuses('more than one', command='length', files=[self.put(
            'model.csv', MODEL_HEAD + 'HY,cpu,f32,inf,8,64,1000,1e6\nGF,cpu,f32,inf,8,64,1000,1e6\n')])
        self.refuses('7 runs', command='train', files=[self.put('run.csv', TRAIN_HEAD + '1,1,1,\n')] * 7)

    def test_files_that_cannot_be_written(self):
        self.put('run.csv', TRAIN_HEAD + '1,10,3,2\n2,20,2.5,2\n')
        self.refuses('none/out.svg', 'No such file', command='train', files=['run.csv'], output='none/out.svg')
        os.mkdir('folder.svg')
        self.refuses('folder.svg', command='train', files=['run.csv'], output='folder.svg')
        os.rename('run.csv', 'run.svg')
        self.refuses('run.svg', 'overwritten', command='train', files=['run.svg'], output='run.svg')
        self.put('out.svg', 'what was there')
        self.plot('train', '-o', 'other.svg', 'run.svg')
        os.remove('other.svg')
        os.rename('run.svg', 'fresh.svg.new')  # the name that is written first is that of no input, nor of any file
        self.put('fresh.svg.tmp', 'mine')
        self.plot('train', '-o', 'fresh.svg', 'fresh.svg.new')
        self.assertEqual((self.get('fresh.svg.new')[:4], self.get('fresh.svg.tmp')), ('step', 'mine'))
        self.assertEqual(os.stat('fresh.svg').st_mode, os.stat('out.svg').st_mode)
        os.rename('fresh.svg.new', 'run.svg')
        before = sorted(os.listdir())
        message = self.plot('train', '-o', 'out.svg', 'run.svg', status=1, preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (4096, 4096)))
        self.assertIn('out.svg: File too large', message)
        self.assertEqual(sorted(os.listdir()), before)
        self.assertEqual(self.get('out.svg'), 'what was there')
        if os.path.exists('/dev/full'):
            self.put('bench.csv', bench_rows(('gt', 'B1 T1 H1 N64', 1, 1)))
            with open('/dev/full', 'w') as full:
                result = subprocess.run([sys.executable, PLOT, 'table', 'bench.csv'], stdout=full,
                                        stderr=subprocess.PIPE, text=True)
            self.assertEqual((result.returncode, result.stderr),
                             (1, 'plot.py: standard output: No space left on device\n'))

    def test_bad_command_lines(self):
        self.put('run.csv', TRAIN_HEAD + '1,10,3,\n')
        for arguments, word in ((['train', 'run.csv'], '-o'), (['train', '-o', 'out.txt', 'run.csv'], '.svg'),
                                (['train', '-o', 'out.svg', 'run.csv', '--label', 'a', '--label', 'b'], '--label'),
                                (['none'], 'none'), ([], 'COMMAND')):
            self.assertIn(word, self.plot(*arguments, status=2))
        self.assertEqual(os.listdir(), ['run.csv'])

    # ---- the results in the repository -----------------------------------------------------------

    def test_figures_are_of_the_results(self):
        self.plot('results', '.')
        shown = self.get(os.path.join(ROOT, 'README.md'))
        figures = sorted(os.listdir())
        self.assertEqual(figures, sorted(os.listdir(os.path.join(ROOT, 'docs/figures'))))
        for name in figures:
            self.assertTrue(f'docs/figures/{name}' in shown, f'README.md does not show {name}')
            new, committed = self.get(name), self.get(os.path.join(ROOT, 'docs/figures', name))
            if f'Matplotlib v{matplotlib.__version__},' not in committed:  # at least the same points
                new = re.search(r'data: sha256 \w{64}', new)[0]
            self.assertTrue(new in committed, f'{name}: run tools/plot.py results')

    def test_readme_has_the_table(self):
        self.assertTrue(self.plot('results-table') in self.get(os.path.join(ROOT, 'README.md')),
                        'README.md: the table must be the output of tools/plot.py results-table')


if __name__ == '__main__':
    hybrid_train = os.path.abspath(sys.argv.pop(1))
    with tempfile.TemporaryDirectory() as settings:
        os.environ['MPLCONFIGDIR'] = settings  # Matplotlib lists the fonts there
        unittest.main()
