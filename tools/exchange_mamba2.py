#!/usr/bin/env python3
"""Exchanges Mamba-2 models between hybrid_train and the package transformers:

    hybrid_train --data book.txt --model Mamba-2 --ffn none --save book.st
    python3 tools/exchange_mamba2.py export book.st FOLDER     Mamba2ForCausalLM.from_pretrained('FOLDER') reads it
    python3 tools/exchange_mamba2.py import FOLDER other.st    --init, --eval and --generate of hybrid_train read it

FOLDER holds config.json and model.safetensors.  Both models compute the same logits up to rounding.  Import refuses a
checkpoint that hybrid_train would compute differently, and names the field of config.json.  It reads weights in F32,
BF16 and F16, in one file or in several with model.safetensors.index.json; hybrid_train keeps them in F32.  A model of a
checkpoint reads tokens as numbers of 16 bits, or of 32 if its vocabulary needs them.  Export keeps the vocabulary of
hybrid_train under the key hybrid_train of config.json, and import takes it from there.  Export takes the moving average
of the weights if the model file has one.  No file is overwritten.  Needs only Python.
Status: 0 done, 1 a file is refused or cannot be written, 2 a bad command line."""
import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import struct
import sys

FORMAT = 'hybrid_train_format'
# Metadata of a model file that config.json carries along, so that an import restores it.
CARRIED = ('vocabulary', 'first_byte', 'vocabulary_size', 'first_token', 'option.tokens', 'option.end-symbol',
           'option.separator', 'option.end-token')
# Defaults of transformers for fields that config.json leaves out.
ASSUMED = {'vocab_size': 32768, 'hidden_size': 4096, 'num_hidden_layers': 64, 'state_size': 128, 'expand': 2,
           'conv_kernel': 4, 'num_heads': 128, 'head_dim': 64, 'n_groups': 8, 'use_bias': False, 'use_conv_bias': True,
           'hidden_act': 'silu', 'rms_norm': True, 'layer_norm_epsilon': 1e-5, 'time_step_limit': [0.0, math.inf],
           'tie_word_embeddings': False}
PIECE = 1 << 22  # bytes that are in memory at once, a multiple of all element sizes


class Failure(Exception):
    """Text for the user.  It ends the program with status 1."""


# ---- safetensors ----------------------------------------------------------------------------------------------------


class Tensors:
    """The tensors of a safetensors file: `about` is its metadata, `shapes` has a shape per name."""

    def __init__(self, name):
        self.name = name
        try:
            self.file = open(name, 'rb')
            size = os.fstat(self.file.fileno()).st_size
            start = self.file.read(8)
            length = struct.unpack('<Q', start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise Failure(f'{name}: not a safetensors file, or cut short')
            self.header = self.file.read(length)
            self.data = 8 + length
            header = json.loads(self.header)
            self.about = header.pop('__metadata__', {})
            self.places = {key: (t['dtype'], tuple(t['shape']), *t['data_offsets']) for key, t in header.items()}
        except OSError as error:
            raise Failure(f'{name}: {error.strerror}') from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failure(f'{name}: not a safetensors file: {error!r}') from None
        for key, (dtype, shape, begin, end) in self.places.items():
            width = {'F32': 4, 'BF16': 2, 'F16': 2, 'I64': 8}.get(dtype)
            if width is None:
                raise Failure(f'{name}: tensor {key} has the dtype {dtype}; must be F32, BF16 or F16')
            if end - begin != width * math.prod(shape) or begin < 0 or self.data + end > size:
                raise Failure(f'{name}: damaged: the shape of tensor {key} does not match its data_offsets')
        self.shapes = {key: place[1] for key, place in self.places.items()}

    def pieces(self, key):
        """The tensor's bytes in F32, piece by piece."""
        dtype, _, begin, end = self.places[key]
        self.file.seek(self.data + begin)
        while begin < end:
            piece = self.file.read(min(PIECE, end - begin))
            begin += len(piece)
            if dtype == 'BF16':  # the upper half of an F32
                wide = bytearray(2 * len(piece))
                wide[2::4], wide[3::4] = piece[0::2], piece[1::2]
                piece = bytes(wide)
            elif dtype == 'F16':
                count = len(piece) // 2
                piece = struct.pack(f'<{count}f', *struct.unpack(f'<{count}e', piece))
            yield piece

    def check_sum(self):
        """Refuses a file of hybrid_train whose checksum is wrong.  A file may lack one."""
        digits = self.about.get('checksum', 'sha256:')[7:].encode()
        if not digits:
            return
        self.file.seek(self.data)
        found = hashlib.sha256(struct.pack('<Q', len(self.header)) + self.header.replace(digits, b'0' * 64, 1))
        for piece in iter(lambda: self.file.read(PIECE), b''):
            found.update(piece)
        if found.hexdigest().encode() != digits:
            raise Failure(f'{self.name}: damaged: its checksum is wrong')


def write_tensors(file, about, tensors):
    """Writes a safetensors file of F32 tensors: (name, shape, pieces of bytes) each."""
    header, end = {'__metadata__': about}, 0
    for name, shape, _ in tensors:
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [begin, end]}
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    file.write(struct.pack('<Q', len(text)) + text)
    for _, _, pieces in tensors:
        for piece in pieces:
            file.write(piece)


@contextlib.contextmanager
def new_file(name):
    """A file that gets its name when it is complete.  After a failure there is none."""
    draft = f'{name}.{os.getpid()}.tmp'
    if os.path.lexists(name):
        raise Failure(f'{name}: already exists; give another name')
    try:
        with open(draft, 'xb') as file:
            yield file
        os.rename(draft, name)
    except OSError as error:
        raise Failure(f'{name}: {error.strerror}') from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)


# ---- the model ------------------------------------------------------------------------------------------------------


def parts_of(c):
    """All tensors of a model with this configuration: name here, name there, shape here, shape there."""
    width, inner, heads = c['hidden_size'], c['hidden_size'] * c['expand'], c['num_heads']
    conv = inner + 2 * c['state_size']
    table, filters = (c['vocab_size'], width), (conv, c['conv_kernel'])
    yield 'embedding', 'backbone.embeddings.weight', table, table
    layer = [('norm', 'norm.weight', (width,)),
             ('mamba.in', 'mixer.in_proj.weight', (inner + conv + heads, width)),  # rows z, x, B, C, dt in both
             ('mamba.conv_weight', 'mixer.conv1d.weight', filters),
             ('mamba.conv_bias', 'mixer.conv1d.bias', (conv,)),
             ('mamba.dt_bias', 'mixer.dt_bias', (heads,)),
             ('mamba.A_log', 'mixer.A_log', (heads,)),
             ('mamba.Dskip', 'mixer.D', (heads,)),
             ('mamba.norm', 'mixer.norm.weight', (inner,)),
             ('mamba.out', 'mixer.out_proj.weight', (width, inner))]
    for i in range(c['num_hidden_layers']):
        for here, there, shape in layer:
            yield (f'layers.{i}.{here}', f'backbone.layers.{i}.{there}', shape,
                   (conv, 1, c['conv_kernel']) if shape is filters else shape)
    yield 'final_norm', 'backbone.norm_f.weight', (width,), (width,)
    if not c['tie_word_embeddings']:
        yield 'head', 'lm_head.weight', table, table


def check_shape(name, key, found, wanted):
    if found is None:
        raise Failure(f'{name}: there is no tensor {key}')
    if found != wanted:
        raise Failure(f'{name}: tensor {key} has the shape {list(found)}; its configuration needs {list(wanted)}')


# ---- export ---------------------------------------------------------------------------------------------------------


def whole_option(model, option):
    text = model.about.get(f'option.{option}', '')
    if not re.fullmatch('[1-9][0-9]{0,8}', text):
        raise Failure(f"{model.name}: option.{option} is '{text}': must be a whole number above 0")
    return int(text)


def config_of(model):
    """The config.json of a model file."""
    about = model.about
    if FORMAT not in about:
        raise Failure(f"{model.name}: not a model file of hybrid_train: it has no key '{FORMAT}'")
    for option, wanted, advice in (('model', 'Mamba-2', 'transformers has only a counterpart of Mamba-2'),
                                   ('ffn', 'none', 'layers of Mamba2ForCausalLM have no FFN')):
        found = about.get(f'option.{option}', '')
        if found != wanted:
            raise Failure(f"{model.name}: option.{option} is '{found}': must be '{wanted}', because {advice}")
    shape = model.shapes.get('embedding', ())
    if len(shape) != 2:
        raise Failure(f'{model.name}: tensor embedding is missing, or is not a matrix')
    config = {'architectures': ['Mamba2ForCausalLM'], 'model_type': 'mamba2', 'vocab_size': shape[0],
              'hidden_size': whole_option(model, 'hidden'), 'num_hidden_layers': whole_option(model, 'layers'),
              'state_size': whole_option(model, 'd-state'), 'expand': whole_option(model, 'expand'),
              'conv_kernel': whole_option(model, 'd-conv'), 'head_dim': whole_option(model, 'mamba-head')}
    config['num_heads'] = config['expand'] * config['hidden_size'] // config['head_dim']
    end = about.get('option.end-token', '-1')
    if about.get('option.end-symbol') == 'yes':
        end = shape[0] - 1
    return {**config, 'n_groups': 1, 'hidden_act': 'silu', 'use_bias': False, 'use_conv_bias': True, 'rms_norm': True,
            'layer_norm_epsilon': 1e-5, 'residual_in_fp32': True, 'chunk_size': 256,
            'tie_word_embeddings': about.get('option.untied') != 'yes', 'torch_dtype': 'float32', 'bos_token_id': None,
            'eos_token_id': int(end) if int(end) >= 0 else None, 'pad_token_id': None,
            'hybrid_train': {key: about[key] for key in CARRIED if key in about}}


def export_model(source, folder):
    model = Tensors(source)
    config = config_of(model)
    model.check_sum()
    prefix = 'ema.' if 'ema.embedding' in model.shapes else ''
    parts = list(parts_of(config))
    for here, _, shape, _ in parts:
        check_shape(source, prefix + here, model.shapes.get(prefix + here), shape)
    weights = {key for key in model.shapes if not key.startswith(('optimizer.', 'state.', 'run.', 'ema.'))}
    if len(weights) != len(parts):
        others = sorted(weights - {here for here, *_ in parts})
        raise Failure(f'{source}: unknown tensor {others[0]}')
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Failure(f'{folder}: {error.strerror}') from None
    with new_file(os.path.join(folder, 'config.json')) as text:
        text.write((json.dumps(config, indent=2) + '\n').encode())
        with new_file(os.path.join(folder, 'model.safetensors')) as file:
            write_tensors(file, {'format': 'pt'}, [(there, shape, model.pieces(prefix + here))
                                                   for here, there, _, shape in parts])
    print(f'{folder}: Mamba2ForCausalLM of {source}, {len(parts)} tensors')


# ---- import ---------------------------------------------------------------------------------------------------------


def read_json(name):
    try:
        with open(name, encoding='utf-8') as file:
            value = json.load(file)
    except OSError as error:
        raise Failure(f'{name}: {error.strerror}') from None
    except ValueError as error:
        raise Failure(f'{name}: not a JSON file: {error}') from None
    if not isinstance(value, dict):
        raise Failure(f'{name}: must contain a JSON object')
    return value


def is_whole(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)


def float_of(value):
    """A number of config.json; newer versions of transformers write infinity as an object."""
    value = float(value.get('__float__')) if isinstance(value, dict) else value
    return float(value) if isinstance(value, (int, float)) else math.nan


def check_config(name, given):
    """The configuration with all fields that the model needs.  Refuses what hybrid_train computes differently."""
    def refuse(field, why):
        was = 'is missing, which means' if field not in given else 'is'
        raise Failure(f'{name}: {field} {was} {json.dumps(c[field])}: {why}')

    c = {'model_type': None, **ASSUMED, **given}
    if c['model_type'] != 'mamba2':
        refuse('model_type', 'must be "mamba2"')
    for field, least, most, step in (('vocab_size', 2, 1 << 20, 1), ('hidden_size', 16, 8192, 16),
                                     ('num_hidden_layers', 1, 128, 1), ('state_size', 8, 256, 8), ('expand', 1, 8, 1),
                                     ('conv_kernel', 2, 4, 1), ('head_dim', 1, 256, 1), ('num_heads', 1, 65536, 1)):
        value = c[field]
        if not is_whole(value) or not least <= value <= most or value % step:
            steps = f', a multiple of {step}' if step > 1 else ''
            refuse(field, f'must be a whole number from {least} to {most}{steps}')
        c[field] = int(value)
    if c['num_heads'] * c['head_dim'] != c['expand'] * c['hidden_size']:
        refuse('num_heads', f"times head_dim = {c['head_dim']} must be expand x hidden_size = "
                            f"{c['expand'] * c['hidden_size']}")
    for field in ('use_bias', 'use_conv_bias', 'rms_norm', 'tie_word_embeddings'):
        if not isinstance(c[field], bool):
            refuse(field, 'must be true or false')
    if c['n_groups'] != 1:
        refuse('n_groups', 'must be 1, because in hybrid_train all heads share one group of B and C')
    if c['use_bias']:
        refuse('use_bias', 'must be false, because the projections of hybrid_train have no bias')
    if not c['rms_norm']:
        refuse('rms_norm', 'must be true, because hybrid_train has a norm before the out-projection')
    if c['hidden_act'] not in ('silu', 'swish'):
        refuse('hidden_act', 'must be "silu", as in hybrid_train')
    if abs(float_of(c['layer_norm_epsilon']) / 1e-5 - 1) > 1e-6 or math.isnan(float_of(c['layer_norm_epsilon'])):
        refuse('layer_norm_epsilon', 'must be 1e-05, as in hybrid_train')
    limits = c['time_step_limit']
    if not isinstance(limits, list) or len(limits) != 2 or not float_of(limits[0]) <= 0 or \
            float_of(limits[1]) != math.inf:
        refuse('time_step_limit', 'must be [0, Infinity], because hybrid_train does not limit dt')
    return c


def open_weights(folder):
    """The checkpoint's tensors: name -> (file, name in the file)."""
    single, index = (os.path.join(folder, 'model.safetensors' + end) for end in ('', '.index.json'))
    names = {'': single}
    if not os.path.exists(single) and os.path.exists(index):
        names = read_json(index).get('weight_map')
        if not isinstance(names, dict) or not all(isinstance(n, str) and n == os.path.basename(n)
                                                  for n in names.values()):
            raise Failure(f'{index}: weight_map must map each tensor to the name of a file')
        names = {n: os.path.join(folder, n) for n in names.values()}
    found = {}
    for file in map(Tensors, sorted(set(names.values()))):
        for key in file.shapes:  # older versions of transformers use the second name
            found[key.replace('backbone.embedding.', 'backbone.embeddings.')] = file, key
    return found


def vocabulary_of(name, c):
    """Metadata about the vocabulary: what an export carried along, or numbers as tokens."""
    carried, size = c.get('hybrid_train'), c['vocab_size']
    if carried is None:
        return {'vocabulary_size': str(size), 'first_token': '0', 'option.end-symbol': 'no',
                'option.tokens': 'uint16' if size <= 65536 else 'uint32'}
    if not isinstance(carried, dict) or not all(key in CARRIED and isinstance(text, str)
                                                for key, text in carried.items()):
        raise Failure(f'{name}: the field hybrid_train is damaged: it contains other keys or values than '
                      'an export writes')
    count = carried.get('vocabulary_size')
    if count is None:
        count = str(len(carried.get('vocabulary', '').split()) + (carried.get('option.end-symbol') == 'yes'))
    if count != str(size):
        raise Failure(f'{name}: the field hybrid_train has a vocabulary of {count}, but vocab_size is {size}')
    return carried


def import_model(folder, target):
    name = os.path.join(folder, 'config.json')
    c = check_config(name, read_json(name))
    found = open_weights(folder)
    tensors, seen = [], set()
    for here, there, shape, wanted in parts_of(c):
        if there.endswith('conv1d.bias') and not c['use_conv_bias']:
            tensors.append((here, shape, [bytes(4 * shape[0])]))  # a bias of zeros computes the same
            continue
        file, key = found.get(there, (None, None))
        check_shape(folder, there, file and file.shapes[key], wanted)
        if file.places[key][0] == 'I64':
            raise Failure(f'{file.name}: tensor {key} has the dtype I64; must be F32, BF16 or F16')
        seen.add(there)
        tensors.append((here, shape, file.pieces(key)))
    if c['tie_word_embeddings'] and 'lm_head.weight' in found:
        both = [b''.join(file.pieces(key)) for file, key in (found['lm_head.weight'],
                                                             found['backbone.embeddings.weight'])]
        if both[0] != both[1]:
            raise Failure(f'{name}: tie_word_embeddings is true: lm_head.weight must equal the embedding, or be '
                          'missing')
        seen.add('lm_head.weight')
    others = sorted(set(found) - seen)
    if others:
        raise Failure(f'{folder}: unknown tensor {others[0]}')
    sizes = {'model': 'Mamba-2', 'hidden': c['hidden_size'], 'layers': c['num_hidden_layers'], 'heads': 0,
             'd-state': c['state_size'], 'expand': c['expand'], 'd-conv': c['conv_kernel'],
             'mamba-head': c['head_dim'], 'ffn': 'none', **({} if c['tie_word_embeddings'] else {'untied': 'yes'})}
    about = {FORMAT: '3', **vocabulary_of(name, c), **{f'option.{key}': str(value) for key, value in sizes.items()}}
    with new_file(target) as file:
        write_tensors(file, about, tensors)
    print(f"{target}: Mamba-2 of {folder}, {c['hidden_size']} channels, {c['num_hidden_layers']} layers, tokens "
          f"{about['option.tokens']}, vocabulary {c['vocab_size']}")


def main():
    parser = argparse.ArgumentParser(prog='exchange_mamba2.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('direction', choices=('export', 'import'))
    parser.add_argument('source', metavar='FROM')
    parser.add_argument('target', metavar='TO')
    options = parser.parse_args()
    try:
        (export_model if options.direction == 'export' else import_model)(options.source, options.target)
    except Failure as failure:
        print(f'exchange_mamba2.py: {failure}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
