"""tools/tokenize_text.py, tools/needle.py, tools/csv_to_tensorboard.py and tools/exchange_mamba2.py, beside
hybrid_train.  Needs Python alone: where the package tokenizers is missing, a small one of the test takes its place.

    test_train_tools.py HYBRID_TRAIN LOGITS"""
import array
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOOLS = os.path.join(ROOT, 'tools')
hybrid_train = logits_program = None

# Takes the longest token at every place, with the letters of byte-level tokenisers.
PACKAGE = '''
import json, sys
sys.path.insert(0, %r)
from tokenize_text import byte_letters
class Encoding:
    def __init__(self, ids): self.ids = ids
class Tokenizer:
    @staticmethod
    def from_file(name):
        self = Tokenizer()
        with open(name) as file: data = json.load(file)
        self.vocab = data['model']['vocab']
        self.added = {a['content']: a['id'] for a in data['added_tokens']}
        return self
    def token_to_id(self, token): return self.added.get(token, self.vocab.get(token))
    def encode(self, text, add_special_tokens=True):
        letters = {byte: letter for letter, byte in byte_letters().items()}
        text, ids = ''.join(letters[b] for b in text.encode()), []
        while text:
            token = max((t for t in self.vocab if text.startswith(t)), key=len)
            ids.append(self.vocab[token]); text = text[len(token):]
        return Encoding(ids)
''' % TOOLS


def tokenizer():
    """All bytes, two pieces of two bytes, and the end of a text."""
    sys.path.insert(0, TOOLS)
    from tokenize_text import byte_letters
    letters = sorted(byte_letters(), key=byte_letters().get)
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary.update({'th': 256, '\u0120a': 257})
    return {'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None, 'post_processor': None,
            'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False},
            'decoder': {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True, 'use_regex': True},
            'added_tokens': [{'id': 258, 'content': '<end>', 'single_word': False, 'lstrip': False, 'rstrip': False,
                              'normalized': False, 'special': True}],
            'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                      'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'vocab': vocabulary,
                      'merges': ['t h', '\u0120 a']}}


class ToolTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.chdir(folder.name)
        self.addCleanup(os.chdir, ROOT)
        self.environment = dict(os.environ)

    def tool(self, name, *arguments, status=0):
        result = subprocess.run([sys.executable, os.path.join(TOOLS, name), *arguments], capture_output=True, text=True,
                                env=self.environment)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        return result.stderr if status else result.stdout

    def train(self, *arguments):
        result = subprocess.run([hybrid_train, *arguments], capture_output=True, encoding='utf-8', errors='replace')
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout


class TokenizeTest(ToolTest):
    def setUp(self):
        super().setUp()
        with open('tokenizer.json', 'w', encoding='utf-8') as file:
            json.dump(tokenizer(), file)
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            os.mkdir('packages')
            with open('packages/tokenizers.py', 'w', encoding='utf-8') as file:
                file.write(PACKAGE)
            self.environment['PYTHONPATH'] = os.path.abspath('packages')

    def put(self, name, text):
        with open(name, 'wb') as file:
            file.write(text.encode() if isinstance(text, str) else text)
        return name

    def test_tokens_and_table(self):
        text = 'the \u03b8 a\n\\ath'
        out = self.tool('tokenize_text.py', 'tokenizer.json', self.put('a.txt', text), self.put('b.txt', 'th'),
                        '-o', 'out.u16', '--end', '<end>')
        self.assertIn('--tokens uint16 --vocab 259 --table out.u16.table --end-token 258', out)
        numbers = array.array('H')
        with open('out.u16', 'rb') as file:
            numbers.frombytes(file.read())
        self.assertEqual(list(numbers), [256, 101, 32, 0xce, 0xb8, 257, 10, 92, 97, 256, 258, 256, 258])
        with open('out.u16.table', encoding='ascii') as file:
            lines = file.read().split('\n')
        self.assertEqual((len(lines), lines[10], lines[92], lines[0xce], lines[0]), (260, '\\n', '\\\\', '\\xce', '\\x00'))
        self.assertEqual(lines[256:], ['th', ' a', '<end>', ''])
        self.assertEqual(self.tool('tokenize_text.py', 'tokenizer.json', '--encode', 'th a'), '256,257\n')

    def test_refuses(self):
        def refuses(word, *arguments):
            before = sorted(os.listdir())
            message = self.tool('tokenize_text.py', *arguments, status=1)
            self.assertIn(word, message)
            self.assertEqual((message.count('\n'), sorted(os.listdir())), (1, before))

        self.put('a.txt', 'th')
        refuses('none.json: No such file', 'none.json', 'a.txt', '-o', 'out.u16')
        refuses('a.txt: not a JSON file', 'a.txt', 'a.txt', '-o', 'out.u16')
        refuses('not a tokenizer.json', self.put('empty.json', '{}'), 'a.txt', '-o', 'out.u16')
        refuses('not a UTF-8 text: byte 1 is wrong', 'tokenizer.json', self.put('bad.txt', b'a\xff'), '-o', 'out.u16')
        refuses("'<no>' is not a token", 'tokenizer.json', 'a.txt', '-o', 'out.u16', '--end', '<no>')
        refuses('would be overwritten', 'tokenizer.json', 'a.txt', '-o', 'a.txt')
        refuses('none/out.u16', 'tokenizer.json', 'a.txt', '-o', 'none/out.u16')
        large = tokenizer()
        large['added_tokens'][0]['id'] = 65536
        refuses('65537 tokens do not fit into 16 bits', self.put('large.json', json.dumps(large)), 'a.txt', '-o', 'out.u16')
        os.makedirs('without')
        self.put('without/tokenizers.py', 'raise ImportError("no tokenizers")')
        self.environment['PYTHONPATH'] = os.path.abspath('without')
        refuses('no tokenizers: pip install tokenizers', 'tokenizer.json', 'a.txt', '-o', 'out.u16')

    def test_trains_on_tokens(self):
        """Samples print as text, and bits per byte are those of the text."""
        text = 'the cat sat a the hat th ath. ' * 150
        self.tool('tokenize_text.py', 'tokenizer.json', self.put('a.txt', text), '-o', 'a.u16')
        common = ['--device', 'cpu', '--hidden', '16', '--layers', '1', '--batch', '2', '--seq', '16', '--steps', '30']
        data = ['--data', 'a.u16', '--tokens', 'uint16', '--vocab', '259', '--table', 'a.u16.table']
        out = self.train(*common, *data, '--sample', '40', '--prompt', '256,101', '--save', 'm.st')
        sample = out.split('-' * 64)[1].strip('\n')
        self.assertTrue(sample.startswith('the') and not re.search(r'\d', sample[:3]), sample)
        loss = float(out.rsplit('held-out loss ', 1)[1])
        per_byte, size = re.search(r'bytes +([\d.]+) bits per byte: these tokens\s+stand for ([\d,]+) bytes', out).groups()
        tokens = int(re.search(r'all ([\d,]+) tokens', out)[1].replace(',', ''))
        size = int(size.replace(',', ''))
        self.assertGreater(size, tokens)
        self.assertAlmostEqual(float(per_byte), loss / 0.693147 * tokens / size, delta=2e-4)
        drawn = self.train('--generate', 'm.st', '--sample', '40')  # the table's name is in the model file
        self.assertEqual(drawn[:3], 'the')
        self.assertIn('bits per byte', self.train('--eval', 'm.st'))
        for table, words in (('a\n', 'it has 1 tokens, but the vocabulary has 259'), ('a\\q\n', 'line 1: unknown escape'),
                             ('a', 'must end with a line break')):
            result = subprocess.run([hybrid_train, *common, *data[:-1], self.put('bad.table', table)],
                                    capture_output=True, text=True)
            self.assertEqual((result.returncode, words in result.stderr), (2, True), result.stderr)


def events_of(data):
    """(wall time, step, {tag: value}) of each event; every checksum is computed bit by bit, and must be right."""
    def crc(part):
        value = 0xffffffff
        for bit in (byte >> i & 1 for byte in part for i in range(8)):
            value = value >> 1 ^ (0x82f63b78 if (value ^ bit) & 1 else 0)
        value ^= 0xffffffff
        return ((value >> 15 | value << 17) + 0xa282ead8) % 2**32

    def fields(message):
        at = 0

        def varint():
            nonlocal at
            value = shift = 0
            while True:
                byte, at = message[at], at + 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value
        while at < len(message):
            key = varint()
            size = {0: 0, 1: 8, 5: 4}.get(key & 7)
            if key & 7 == 0:
                yield key >> 3, varint()
                continue
            size = varint() if size is None else size
            yield key >> 3, message[at:at + size]
            at += size

    at = 0
    while at < len(data):
        length = struct.unpack('<Q', data[at:at + 8])[0]
        body = data[at + 12:at + 12 + length]
        assert struct.unpack('<I', data[at + 8:at + 12])[0] == crc(data[at:at + 8])
        assert struct.unpack('<I', data[at + 12 + length:at + 16 + length])[0] == crc(body)
        at += 16 + length
        event = dict(fields(body))
        scalars = {}
        for _, value in fields(event.get(5, b'')):
            pair = dict(fields(value))
            scalars[pair[1].decode()] = struct.unpack('<f', pair[2])[0]
        yield struct.unpack('<d', event[1])[0], event[2], scalars if 5 in event else event[3]


class TensorBoardTest(ToolTest):
    def test_events(self):
        self.train('--device', 'cpu', '--hidden', '16', '--layers', '1', '--batch', '2', '--seq', '8', '--steps', '6',
                   '--eval-every', '3', '--eval-tokens', '32', '--final-eval-tokens', '64', '--sample', '0', '--csv',
                   'one.csv')
        out = self.tool('csv_to_tensorboard.py', 'runs', 'one.csv')
        self.assertEqual(out, 'runs/one/events.out.tfevents.0.one: 6 steps\n')
        with open('runs/one/events.out.tfevents.0.one', 'rb') as file:
            events = list(events_of(file.read()))
        with open('one.csv', encoding='ascii') as file:
            heads, *rows = [line.rstrip('\n').split(',') for line in file]
        self.assertEqual((events[0][1:], len(events)), ((0, b'brain.Event:2'), 7))
        for (wall, step, scalars), row in zip(events[1:], rows):
            wanted = {head: float(text) for head, text in zip(heads, row) if text and head not in ('step', 'seconds')}
            self.assertEqual((step, set(scalars)), (int(row[0]), set(wanted)))
            for tag, value in wanted.items():
                self.assertAlmostEqual(scalars[tag], value, delta=1e-6 * abs(value))
        self.assertEqual([event[1] for event in events[1:] if 'held_out' in event[2]], [3, 6])
        self.assertIn('final_loss', events[-1][2])
        self.assertTrue(all(a[0] <= b[0] for a, b in zip(events, events[1:])))

    def test_refuses(self):
        def refuses(word, *arguments, status=1):
            self.assertIn(word, self.tool('csv_to_tensorboard.py', 'runs', *arguments, status=status))
            self.assertFalse(os.path.exists('runs'))

        def put(name, text):
            with open(name, 'w', encoding='latin-1') as file:
                file.write(text)
            return name

        refuses('none.csv: No such file', 'none.csv')
        refuses("no column 'step'", put('a.csv', 'tokens,loss\n1,2\n'))
        refuses('line 2 has 1 fields, the header has 2', put('b.csv', 'step,loss\n1\n'))
        refuses("line 2: column 'loss': 'x' is not a number", put('c.csv', 'step,loss\n1,x\n'))
        refuses("column 'step' is not a whole number", put('d.csv', 'step,loss\n1.5,2\n'))
        refuses('no rows below the header', put('e.csv', 'step,loss\n'))
        refuses('not a text file', put('f.csv', '\xff\xfe'))
        refuses('two logs have the same file name', 'a.csv', './a.csv', status=2)
        put('runs', 'a file')
        self.assertIn('runs/a', self.tool('csv_to_tensorboard.py', 'runs', put('a.csv', 'step,loss\n1,2\n'), status=1))


# ---- Mamba-2 as transformers computes it, in doubles ----


def product(matrix, x):
    return [sum(a * b for a, b in zip(row, x)) for row in matrix]


def silu(x):
    return x / (1 + math.exp(-x))


def rms_norm(x, weight, eps):
    scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v * scale * w for v, w in zip(x, weight)]


def mixer(c, w, inputs):
    """One mixer over a whole sequence, from the equations of the recurrence."""
    inner, heads, states = c['expand'] * c['hidden_size'], c['num_heads'], c['state_size']
    before = [[0.0] * (inner + 2 * states)] * (c['conv_kernel'] - 1)  # the convolution's inputs before the sequence
    state = [[[0.0] * states for _ in range(c['head_dim'])] for _ in range(heads)]
    bias = w['conv1d.bias'] if c['use_conv_bias'] else [0.0] * (inner + 2 * states)
    for n in inputs:
        row = product(w['in_proj.weight'], n)
        gate, conv, dt = row[:inner], row[inner:-heads], row[-heads:]
        window = [*before, conv]
        before = window[1:]
        conv = [silu(b + sum(f * old[i] for f, old in zip(filters[0], window)))
                for i, (filters, b) in enumerate(zip(w['conv1d.weight'], bias))]
        x, B, C = conv[:inner], conv[inner:-states], conv[-states:]
        y = []
        for h in range(heads):
            step = math.log1p(math.exp(dt[h] + w['dt_bias'][h]))
            decay = math.exp(-step * math.exp(w['A_log'][h]))
            for p in range(c['head_dim']):
                value, s = x[h * c['head_dim'] + p], state[h][p]
                s[:] = [old * decay + step * value * b for old, b in zip(s, B)]
                y.append(sum(a * b for a, b in zip(s, C)) + w['D'][h] * value)
        gated = [value * silu(g) for value, g in zip(y, gate)]
        yield product(w['out_proj.weight'], rms_norm(gated, w['norm.weight'], c['layer_norm_epsilon']))


def mamba2_logits(c, weights, tokens):
    """The logits of Mamba2ForCausalLM after each token."""
    stream = [weights['backbone.embeddings.weight'][token] for token in tokens]
    for i in range(c['num_hidden_layers']):
        start = f'backbone.layers.{i}.'
        normed = [rms_norm(x, weights[start + 'norm.weight'], c['layer_norm_epsilon']) for x in stream]
        w = {name[len(start + 'mixer.'):]: t for name, t in weights.items() if name.startswith(start + 'mixer.')}
        stream = [[a + b for a, b in zip(x, y)] for x, y in zip(stream, mixer(c, w, normed))]
    head = weights['backbone.embeddings.weight' if c['tie_word_embeddings'] else 'lm_head.weight']
    return [product(head, rms_norm(x, weights['backbone.norm_f.weight'], c['layer_norm_epsilon'])) for x in stream]


# ---- checkpoints ----


def nested(numbers, shape):
    if len(shape) == 1:
        return list(numbers)
    size = len(numbers) // shape[0]
    return [nested(numbers[i * size:(i + 1) * size], shape[1:]) for i in range(shape[0])]


def flat(x):
    return [v for part in x for v in flat(part)] if isinstance(x, list) else [x]


def read_tensors(name):
    """All F32 and I64 tensors of a safetensors file, by name, and its metadata."""
    with open(name, 'rb') as file:
        data = file.read()
    length = struct.unpack('<Q', data[:8])[0]
    header, tensors = json.loads(data[8:8 + length]), {}
    about = header.pop('__metadata__')
    for key, t in header.items():
        numbers = array.array({'F32': 'f', 'I64': 'q'}[t['dtype']])
        begin, end = t['data_offsets']
        numbers.frombytes(data[8 + length + begin:8 + length + end])
        tensors[key] = nested(numbers, t['shape'])
    return tensors, about


def put_tensors(name, tensors, about=None):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, body = {'__metadata__': about or {'format': 'pt'}}, b''
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {'dtype': dtype, 'shape': shape, 'data_offsets': [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    with open(name, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + body)


CONFIG = {'model_type': 'mamba2', 'vocab_size': 11, 'hidden_size': 16, 'num_hidden_layers': 2, 'state_size': 8,
          'expand': 2, 'conv_kernel': 4, 'num_heads': 4, 'head_dim': 8, 'n_groups': 1, 'use_bias': False,
          'use_conv_bias': True, 'layer_norm_epsilon': 1e-5, 'tie_word_embeddings': False}
MODEL = ('--device', 'cpu', '--model', 'Mamba-2', '--hidden', '16', '--layers', '2', '--ffn', 'none', '--d-state', '8',
         '--mamba-head', '8', '--batch', '2', '--seq', '16')


def new_weights(c, seed, dtypes=('F32',)):
    """Random weights of a checkpoint: {name: (dtype, shape, bytes)} and {name: nested lists of the same numbers}."""
    draw = random.Random(seed)
    width, inner, heads = c['hidden_size'], c['expand'] * c['hidden_size'], c['num_heads']
    conv = inner + 2 * c['state_size']
    layer = {'norm.weight': ((width,), 1, .3), 'mixer.in_proj.weight': ((inner + conv + heads, width), 0, .3),
             'mixer.conv1d.weight': ((conv, 1, c['conv_kernel']), 0, .5), 'mixer.conv1d.bias': ((conv,), 0, .3),
             'mixer.dt_bias': ((heads,), -1, .5), 'mixer.A_log': ((heads,), 0, .5), 'mixer.D': ((heads,), 1, .3),
             'mixer.norm.weight': ((inner,), 1, .3), 'mixer.out_proj.weight': ((width, inner), 0, .3)}
    if not c['use_conv_bias']:
        del layer['mixer.conv1d.bias']
    table = ((c['vocab_size'], width), 0, 1)
    about = {'backbone.embeddings.weight': table, 'backbone.norm_f.weight': ((width,), 1, .3)}
    for i in range(c['num_hidden_layers']):
        about.update({f'backbone.layers.{i}.{name}': numbers for name, numbers in layer.items()})
    if not c['tie_word_embeddings']:
        about['lm_head.weight'] = table
    stored, values = {}, {}
    for i, (name, (shape, mean, spread)) in enumerate(sorted(about.items())):
        numbers = [draw.gauss(mean, spread) for _ in range(math.prod(shape))]
        dtype = dtypes[i % len(dtypes)]
        if dtype == 'F16':
            data = struct.pack(f'<{len(numbers)}e', *numbers)
            numbers = struct.unpack(f'<{len(numbers)}e', data)
        else:
            data = struct.pack(f'<{len(numbers)}f', *numbers)
            if dtype == 'BF16':
                data = b''.join(data[k + 2:k + 4] for k in range(0, len(data), 4))
                numbers = struct.unpack(f'<{len(numbers)}f', b''.join(b'\0\0' + data[k:k + 2]
                                                                     for k in range(0, len(data), 2)))
            else:
                numbers = struct.unpack(f'<{len(numbers)}f', data)
        stored[name], values[name] = (dtype, list(shape), data), nested(numbers, shape)
    return stored, values


class Mamba2Test(ToolTest):
    def put_checkpoint(self, folder, config, stored, files=1):
        os.makedirs(folder, exist_ok=True)
        with open(f'{folder}/config.json', 'w', encoding='ascii') as file:
            json.dump(config, file)
        if files == 1:
            return put_tensors(f'{folder}/model.safetensors', stored)
        places = {name: f'model-{i % files + 1:05}-of-{files:05}.safetensors' for i, name in enumerate(stored)}
        for place in set(places.values()):
            put_tensors(f'{folder}/{place}', {name: t for name, t in stored.items() if places[name] == place})
        with open(f'{folder}/model.safetensors.index.json', 'w', encoding='ascii') as file:
            json.dump({'metadata': {}, 'weight_map': places}, file)

    def logits(self, model, text):
        result = subprocess.run([logits_program, model], input=text, capture_output=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        return [[float(x) for x in line.split()] for line in result.stdout.decode().splitlines()]

    def same_logits(self, found, wanted):
        """Single precision against doubles."""
        found, wanted = flat(found), flat(wanted)
        self.assertEqual(len(found), len(wanted))
        size = math.sqrt(sum(x * x for x in wanted) / len(wanted))
        error = max(abs(a - b) for a, b in zip(found, wanted))
        self.assertGreater(size, 0.1)
        self.assertLess(error / size, 1e-5)

    def test_import(self):
        tokens = [random.Random(5).randrange(11) for _ in range(40)]
        cases = (({}, ('F32',), 1), ({'tie_word_embeddings': True, 'use_conv_bias': False, 'conv_kernel': 3,
                                      'time_step_limit': [0.0, {'__float__': 'Infinity'}], 'hidden_act': 'swish'},
                                     ('BF16', 'F16', 'F32'), 2),
                 ({'expand': 3, 'head_dim': 16, 'num_heads': 3, 'state_size': 24, 'num_hidden_layers': 1,
                   'time_step_limit': [0.0, math.inf]}, ('BF16',), 1))
        for i, (changes, dtypes, files) in enumerate(cases):
            c = {**CONFIG, **changes}
            stored, values = new_weights(c, i, dtypes)
            if c['tie_word_embeddings']:  # some files hold the embedding twice, or under its older name
                embedding = stored.pop('backbone.embeddings.weight')
                stored.update({'lm_head.weight': embedding, 'backbone.embedding.weight': embedding})
            self.put_checkpoint(f'c{i}', c, stored, files)
            self.assertIn(f'c{i}.st: Mamba-2', self.tool('exchange_mamba2.py', 'import', f'c{i}', f'c{i}.st'))
            self.same_logits(self.logits(f'c{i}.st', array.array('H', tokens).tobytes()),
                             mamba2_logits(c, values, tokens))
        with open('t.u16', 'wb') as file:
            file.write(array.array('H', tokens * 20).tobytes())
        self.assertIn('held-out loss', self.train('--eval', 'c0.st', '--data', 't.u16'))
        self.assertRegex(self.train('--generate', 'c0.st', '--sample', '5', '--prompt', '1,2'), r'^1 2( \d+){5}')
        out = self.train('--init', 'c0.st', '--data', 't.u16', '--batch', '2', '--seq', '8', '--steps', '3', '--sample',
                         '0', '--device', 'cpu', '--save', 'd.st')
        self.assertIn('no FFN, untied', out)
        self.assertIn('complete', self.train('--resume', 'd.st', '--save', 'd.st'))
        loss = self.train('--eval', 'd.st').split('held-out loss ')[1]
        self.tool('exchange_mamba2.py', 'export', 'd.st', 'back')
        self.tool('exchange_mamba2.py', 'import', 'back', 'e.st')
        self.assertIn(f'held-out loss {loss}', self.train('--eval', 'e.st', '--data', 't.u16', '--batch', '2', '--seq',
                                                          '8'))

    def test_export(self):
        text = b'the cat sat on a mat. ' * 150
        with open('a.txt', 'wb') as file:
            file.write(text)
        for name, options in (('a', ['--untied']), ('b', ['--ema', '0.5', '--end-symbol', '--separator', '. '])):
            self.train(*MODEL, '--data', 'a.txt', '--steps', '20', '--lr', '0.02', '--sample', '0', '--save',
                       f'{name}.st', *options)
            self.assertIn('Mamba2ForCausalLM', self.tool('exchange_mamba2.py', 'export', f'{name}.st', name))
            with open(f'{name}/config.json', encoding='ascii') as file:
                config = json.load(file, parse_constant=lambda word: self.fail(f'{word} is no JSON'))
            weights, about = read_tensors(f'{name}/model.safetensors')
            own, metadata = read_tensors(f'{name}.st')
            self.assertEqual((about, config['model_type'], config['num_heads'], config['tie_word_embeddings']),
                             ({'format': 'pt'}, 'mamba2', 4, name == 'b'))
            vocabulary = bytes(map(int, metadata['vocabulary'].split()))
            self.assertEqual(config['vocab_size'], len(vocabulary) + (name == 'b'))
            self.assertEqual(config['eos_token_id'], len(vocabulary) if name == 'b' else None)
            tokens = [vocabulary.index(byte) for byte in text[:20]]
            wanted = mamba2_logits(config, weights, tokens)
            self.tool('exchange_mamba2.py', 'import', name, f'{name}2.st')
            again, restored = read_tensors(f'{name}2.st')
            prefix = 'ema.' if name == 'b' else ''
            self.assertEqual(set(again), {key for key in own if not key.startswith(('optimizer.', 'ema.'))})
            for key, values in again.items():
                self.assertEqual(own[prefix + key], values, key)
            for key in ('vocabulary', 'first_byte', 'option.end-symbol', 'option.separator'):
                self.assertEqual(restored[key], metadata[key])
            for model in f'{name}.st', f'{name}2.st':
                self.same_logits(self.logits(model, text[:20]), wanted)
            windows, both = ('--batch', '2', '--seq', '16'), (f'{name}.st', f'{name}2.st')
            self.assertEqual(*(self.train('--eval', model, '--data', 'a.txt', '--device', 'cpu', *windows)
                               .split('held-out loss ')[1] for model in both))
            self.assertEqual(*(self.train('--generate', model, '--prompt', 'the', '--sample', '20', '--device', 'cpu')
                               for model in both))

    def refuses(self, words, *arguments, also=''):
        before = sorted(os.walk('.'))
        message = self.tool('exchange_mamba2.py', *arguments, status=1)
        self.assertIn(words, message)
        self.assertIn(also, message)
        self.assertEqual((message.count('\n'), sorted(os.walk('.'))), (1, before))

    def test_import_refuses(self):
        stored, _ = new_weights(CONFIG, 1)

        def refuses(words, config=None, tensors=None, also=''):
            self.put_checkpoint('c', CONFIG if config is None else config, stored if tensors is None else tensors)
            self.refuses(words, 'import', 'c', 'c.st', also=also)

        for field, value, words in (
                ('model_type', 'mamba', 'must be "mamba2"'), ('n_groups', 2, 'share one group'),
                ('use_bias', True, 'no bias'), ('hidden_act', 'gelu', 'must be "silu"'), ('rms_norm', False, 'a norm before'),
                ('layer_norm_epsilon', 1e-6, 'must be 1e-05'), ('layer_norm_epsilon', None, 'must be 1e-05'),
                ('time_step_limit', [0.001, 0.1], 'not limit dt'), ('time_step_limit', [0, 1], 'not limit dt'),
                ('time_step_limit', 3, 'must be [0, Infinity], because hybrid_train does not limit dt'), ('hidden_size', 24, 'a multiple of 16'),
                ('hidden_size', '16', 'a whole number'), ('num_hidden_layers', 129, 'from 1 to 128'),
                ('state_size', 12, 'a multiple of 8'), ('expand', 1.5, 'a whole number'), ('expand', True, 'a whole'),
                ('conv_kernel', 5, 'from 2 to 4'), ('head_dim', 0, 'from 1 to 256'),
                ('num_heads', 5, 'must be expand x hidden_size = 32'), ('vocab_size', 1, 'from 2 to 1048576'),
                ('tie_word_embeddings', 1, 'true or false'), ('use_conv_bias', None, 'true or false'),
                ('tie_word_embeddings', True, 'lm_head.weight must equal the embedding')):
            refuses(f'c/config.json: {field} is {json.dumps(value)}: ', {**CONFIG, field: value}, also=words)
        refuses('n_groups is missing, which means 8', {k: v for k, v in CONFIG.items() if k != 'n_groups'})
        refuses('c/config.json: must contain a JSON object', [1])
        refuses('the field hybrid_train has a vocabulary of 12, but vocab_size is 11',
                {**CONFIG, 'hybrid_train': {'vocabulary_size': '12', 'first_token': '0'}})
        refuses('the field hybrid_train is damaged', {**CONFIG, 'hybrid_train': {'run.steps': '3'}})

        def changed(name, value):
            return {key: value if key == name else t for key, t in stored.items() if key != name or value}

        name = 'backbone.layers.1.mixer.D'
        refuses(f'there is no tensor {name}', tensors=changed(name, None))
        refuses(f'tensor {name} has the shape [2]; its configuration needs [4]', tensors=changed(name, ('F32', [2], bytes(8))))
        refuses(f'tensor {name} has the dtype F64', tensors=changed(name, ('F64', [4], bytes(32))))
        refuses(f'tensor {name} has the dtype I64', tensors=changed(name, ('I64', [4], bytes(32))))
        refuses(f'the shape of tensor {name} does not match', tensors=changed(name, ('F32', [4], bytes(12))))
        refuses('unknown tensor x', tensors={**stored, 'x': ('F32', [1], bytes(4))})
        self.put_checkpoint('c', CONFIG, stored)
        self.refuses('c/config.json: already exists', 'import', 'c', 'c/config.json')
        self.refuses('none/c.st: No such file', 'import', 'c', 'none/c.st')
        os.truncate('c/model.safetensors', 100)
        self.refuses('cut short', 'import', 'c', 'c.st')
        os.remove('c/model.safetensors')
        self.refuses('c/model.safetensors: No such file', 'import', 'c', 'c.st')
        with open('c/model.safetensors.index.json', 'w', encoding='ascii') as file:
            json.dump({'weight_map': {'a': '../b'}}, file)
        self.refuses('weight_map must map each tensor to the name of a file', 'import', 'c', 'c.st')
        with open('c/config.json', 'w', encoding='ascii') as file:
            file.write('{')
        self.refuses('c/config.json: not a JSON file', 'import', 'c', 'c.st')

    def test_export_refuses(self):
        with open('a.txt', 'wb') as file:
            file.write(b'the cat sat on a mat. ' * 50)
        run = ('--data', 'a.txt', '--steps', '1', '--sample', '0')
        self.train(*MODEL, *run, '--save', 'good.st')
        self.train(*MODEL[:8], *MODEL[10:], *run, '--save', 'ffn.st')
        self.train(*MODEL[:2], '--model', 'Mamba-1', *MODEL[4:12], *MODEL[14:], *run, '--save', 'mamba1.st')
        self.refuses("option.ffn is '4': must be 'none', because layers of Mamba2ForCausalLM have no FFN", 'export', 'ffn.st', 'out')
        self.refuses("option.model is 'Mamba-1': must be 'Mamba-2', because transformers has only", 'export', 'mamba1.st', 'out')
        self.refuses('a.txt: not a safetensors file', 'export', 'a.txt', 'out')
        self.refuses('none.st: No such file', 'export', 'none.st', 'out')
        with open('good.st', 'rb') as file:
            data = bytearray(file.read())
        data[-1] ^= 1
        with open('bad.st', 'wb') as file:
            file.write(data)
        self.refuses('bad.st: damaged: its checksum is wrong', 'export', 'bad.st', 'out')
        stored, _ = new_weights(CONFIG, 1)
        put_tensors('other.st', stored)
        self.refuses("no key 'hybrid_train_format'", 'export', 'other.st', 'out')
        self.tool('exchange_mamba2.py', 'export', 'good.st', 'out')
        self.refuses('out/config.json: already exists', 'export', 'good.st', 'out')
        os.remove('out/config.json')
        self.refuses('out/model.safetensors: already exists', 'export', 'good.st', 'out')


# ---- retrieval ----


class NeedleTest(ToolTest):
    def numbers(self, name):
        found = array.array('H')
        with open(name, 'rb') as file:
            found.frombytes(file.read())
        return list(found)

    def questions(self, name):
        with open(name, encoding='ascii') as file:
            heading, *lines = file.read().splitlines()
        self.assertEqual(heading, 'length,depth,first,prompt,answer')
        return [[int(word) for word in line.split(',')] for line in lines]

    def test_documents_for_scoring(self):
        """One needle, at its depth in the filler; the question for it ends the document."""
        self.tool('needle.py', 'score', '-o', 's.u16', '--lengths', '9,64,200', '--depths', '0,25,100', '--samples', '3')
        tokens, questions = self.numbers('s.u16'), self.questions('s.u16.csv')
        self.assertEqual((len(questions), len(tokens)), (27, 9 * (9 + 64 + 200)))
        for i, (length, depth, first, prompt, answer) in enumerate(questions):
            document = tokens[first:first + length]
            self.assertEqual((length, depth), ((9, 64, 200)[i // 9], (0, 25, 100)[i // 3 % 3]))
            self.assertEqual((prompt, answer), (length - 2, 2))
            at = 1 + (length - 9) * depth // 100
            marks = [i for i, token in enumerate(document) if token < 3]
            self.assertEqual((marks, [document[i] for i in marks]), ([0, at, length - 4], [0, 1, 2]))
            self.assertEqual(document[at + 1:at + 4], document[-3:])
            self.assertTrue(3 <= document[-3] < 67 <= min(document[-2:]) and max(document[-2:]) < 131)
            filler = document[1:at] + document[at + 4:-4]
            self.assertTrue(all(131 <= token < 195 for token in filler))
        self.tool('needle.py', 'score', '-o', 'again.u16', '--lengths', '9,64,200', '--depths', '0,25,100', '--samples',
                  '3')
        self.assertEqual(self.numbers('again.u16'), tokens)
        self.tool('needle.py', 'score', '-o', 'other.u16', '--lengths', '9,64,200', '--depths', '0,25,100', '--samples',
                  '3', '--seed', '5')
        self.assertNotEqual(self.numbers('other.u16'), tokens)
        self.tool('needle.py', 'score', '-o', 'few.u16', '--lengths', '9', '--keys', '2', '--values', '3')
        few = set(self.numbers('few.u16'))
        self.assertEqual(few - {0, 1, 2}, {3, 4, 67, 68, 69})

    def test_documents_for_training(self):
        """Every question has its needle before it in the document, and lengths keep their bounds."""
        self.tool('needle.py', 'train', '-o', 't.u16', '--tokens', '20000', '--least', '40', '--most', '90', '--needles',
                  '3')
        tokens = self.numbers('t.u16')
        self.assertTrue(20000 <= len(tokens) < 20090 and max(tokens) < 195)
        starts = [i for i, token in enumerate(tokens) if token == 0] + [len(tokens)]
        sizes = [b - a for a, b in zip(starts, starts[1:])]
        self.assertEqual((starts[0], min(sizes), max(sizes)), (0, 40, 90))
        for a, b in zip(starts, starts[1:]):
            known, asked = {}, 0
            for i in range(a, b):
                if tokens[i] == 1:
                    self.assertNotIn(tokens[i + 1], known)
                    known[tokens[i + 1]] = tokens[i + 2:i + 4]
                elif tokens[i] == 2:
                    asked += 1
                    self.assertEqual(known[tokens[i + 1]], tokens[i + 2:i + 4])
            self.assertEqual((len(known), asked), (3, 3))

    def test_refuses(self):
        def refuses(word, *arguments):
            self.assertIn(word, self.tool('needle.py', *arguments, '-o', 'x.u16', status=1))
            self.assertEqual(os.listdir(), [])

        refuses('--lengths: 8: must be at least 9, the tokens', 'score', '--lengths', '64,8')
        refuses('--depths: 101: must be at most 100', 'score', '--depths', '101')
        refuses('--least 20: must be at least 33, the tokens of 4 needles', 'train', '--least', '20')
        refuses('--needles 4: must be at most --keys 3', 'train', '--keys', '3')
        refuses('--most 63: must be at least --least 64', 'train', '--most', '63')
        self.assertIn('none/x.u16', self.tool('needle.py', 'score', '-o', 'none/x.u16', '--lengths', '9', status=1))

    def test_score(self):
        """A model that has learnt one text answers what it says there, and no other question."""
        text = array.array('H', list(range(24)) * 40)
        ask = array.array('H', list(range(24)) * 2)
        for name, numbers in (('t.u16', text), ('s.u16', ask)):
            with open(name, 'wb') as file:
                file.write(numbers.tobytes())
        self.train('--device', 'cpu', '--hidden', '16', '--layers', '1', '--batch', '4', '--seq', '16', '--steps', '60',
                   '--lr', '0.02', '--data', 't.u16', '--tokens', 'uint16', '--vocab', '24', '--sample', '0', '--save',
                   'm.st')
        rows = ['length,depth,first,prompt,answer', '10,0,0,8,2', '10,0,5,30,3', '10,50,0,1,4', '20,0,3,7,1']

        def score(rows, status=0):
            with open('q.csv', 'w', encoding='ascii') as file:
                file.write('\n'.join(rows))
            result = subprocess.run([hybrid_train, '--device', 'cpu', '--eval', 'm.st', '--val', 's.u16', '--score',
                                     'q.csv'], capture_output=True, text=True)
            self.assertEqual(result.returncode, status, result.stdout + result.stderr)
            return result.stderr if status else result.stdout

        out = score(rows)
        self.assertIn('length,depth,asked,right,share\n10,0,2,2,1.0000\n10,50,1,1,1.0000\n20,0,1,1,1.0000\n', out)
        self.assertRegex(out, r'length  depth 0    depth 50 \n +10 +100\.0 +100\.0\n +20 +100\.0\n')
        wrong = array.array('H', [*range(12), 3, *range(13, 24)] * 2)
        with open('s.u16', 'wb') as file:
            file.write(wrong.tobytes())
        out = score(['length,depth,first,prompt,answer', '9,0,0,10,2', '9,0,0,10,3', '9,0,0,11,1', '9,0,0,11,2'])
        self.assertIn('9,0,4,2,0.5000\n', out)  # the third token of the answer, or the second, is not the likeliest

        for word, line in (("line 2: depth: 'x,0,8,2' is not a whole number", '10,x,0,8,2'),
                           ("line 2: answer: '2,1' is not a whole number", '10,0,0,8,2,1'),
                           ("line 2: answer: '' is not a whole number", '10,0,0,8,'),
                           ('line 2: prompt = 0, answer = 2: both must be at least 1', '10,0,0,0,2'),
                           ('q.csv contains a NUL byte', '10,0,0,8,2\n\0'),
                           ('line 2: the question ends at token 49, but the text has 48', '10,0,40,8,1')):
            self.assertIn(word, score([rows[0], line], status=1))
        self.assertIn('the first line must be length', score(rows[1:], status=1))
        self.assertIn('has no questions', score(rows[:1], status=1))
        result = subprocess.run([hybrid_train, '--score', 'q.csv'], capture_output=True, text=True)
        self.assertIn('score: has no effect without --eval', result.stderr)


if __name__ == '__main__':
    hybrid_train, logits_program = map(os.path.abspath, (sys.argv.pop(1), sys.argv.pop(1)))
    unittest.main()
