#!/usr/bin/env python3
"""Writes texts as tokens of a Hugging Face tokeniser, for hybrid_train:

    python3 tools/tokenize_text.py tokenizer.json book.txt more.txt -o book.u16
    hybrid_train --data book.u16 --tokens uint16 --vocab N --table book.u16.table

FILE.u16 holds little-endian numbers of 16 bits, or of 32 with --uint32.  FILE.u16.table says what each token stands for:
line n holds the bytes of token n, with \\n \\t \\r \\f \\\\ \\xNN as escapes.  hybrid_train prints samples with it, and losses
in bits per byte.  --end '<|endoftext|>' puts that token behind every text.  --encode TEXT prints the tokens of a prompt
and writes nothing.  Needs the package tokenizers: pip install tokenizers.
Status: 0 done, 1 a file cannot be read or written, 2 a bad command line."""
import argparse
import array
import json
import os
import re
import sys


class Failure(Exception):
    """An error in the input.  The program prints its text and ends with status 1."""


def byte_letters():
    """The letters that byte-level tokenisers write for bytes, as GPT-2 chose them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in shown}
    letters.update({chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in shown)})
    return letters


def has_part(part, name):
    """Whether a tokeniser's decoder is of a type, or a sequence that holds one."""
    return bool(part) and (part.get('type') == name or any(has_part(p, name) for p in part.get('decoders', [])))


def table_of(tokenizer, name):
    """The bytes of each token, in order; a number that no token has stands for nothing."""
    try:
        vocabulary = tokenizer['model']['vocab']
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else [(p[0], i) for i, p in enumerate(vocabulary)]
        tokens = {number: (text, False) for text, number in pairs}
        tokens.update({added['id']: (added['content'], True) for added in tokenizer.get('added_tokens') or []})
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise Failure(f'{name}: not a tokenizer.json: {error!r}') from None
    letters, is_bytes = byte_letters(), has_part(tokenizer.get('decoder'), 'ByteLevel')

    def bytes_of(text, is_added):
        if is_added:
            return text.encode()
        if is_bytes and all(letter in letters for letter in text):
            return bytes(letters[letter] for letter in text)
        code = re.fullmatch(r'<0x([0-9A-Fa-f]{2})>', text)
        return bytes([int(code[1], 16)]) if code else text.replace('\u2581', ' ').encode()

    return [bytes_of(*tokens.get(number, ('', True))) for number in range(max(tokens) + 1)]


def line_of(piece):
    codes = {10: '\\n', 9: '\\t', 13: '\\r', 12: '\\f', 92: '\\\\'}
    return ''.join(codes.get(b) or (chr(b) if 32 <= b < 127 else f'\\x{b:02x}') for b in piece) + '\n'


def read(name):
    try:
        with open(name, encoding='utf-8', newline='') as file:
            return file.read()
    except OSError as error:
        raise Failure(f'{name}: {error.strerror}') from None
    except UnicodeDecodeError as error:
        raise Failure(f'{name}: not a UTF-8 text: byte {error.start} is wrong') from None


def write(name, data):
    """Writes to a new name first, so that a failure leaves the old file."""
    beside = f'{name}.{os.getpid()}.tmp'
    try:
        with open(beside, 'wb') as file:
            file.write(data)
        os.replace(beside, name)
    except OSError as error:
        if os.path.exists(beside):
            os.remove(beside)
        raise Failure(f'{name}: {error.strerror}') from None


def load(name):
    """The tokeniser, and the bytes of its tokens."""
    text = read(name)
    try:
        tokenizer = json.loads(text)
    except ValueError as error:
        raise Failure(f'{name}: not a JSON file: {error}') from None
    if not isinstance(tokenizer, dict):
        raise Failure(f'{name}: not a tokenizer.json: it contains no JSON object')
    table = table_of(tokenizer, name)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Failure(f'{error}: pip install tokenizers') from None
    try:
        return Tokenizer.from_file(name), table
    except Exception as error:  # the package raises Exception itself
        raise Failure(f'{name}: {error}') from None


def run(options):
    tokenizer, table = load(options.tokenizer)
    if options.encode is not None:
        print(','.join(map(str, tokenizer.encode(options.encode, add_special_tokens=False).ids)))
        return
    if len(table) > 65536 and not options.uint32:
        raise Failure(f'{options.tokenizer}: {len(table)} tokens do not fit into 16 bits: give --uint32')
    if any(os.path.exists(out) and os.path.samefile(out, name) for out in (options.output, options.output + '.table')
           for name in [options.tokenizer, *options.texts] if os.path.exists(name)):
        raise Failure(f'{options.output}: is an input, and would be overwritten; give another name')
    end = None
    if options.end is not None:
        end = tokenizer.token_to_id(options.end)
        if end is None:
            raise Failure(f"--end: '{options.end}' is not a token of {options.tokenizer}")
    numbers, size = array.array('I' if options.uint32 else 'H'), 0
    for name in options.texts:
        text = read(name)
        size += len(text.encode())
        numbers.extend(tokenizer.encode(text, add_special_tokens=False).ids)
        if end is not None:
            numbers.append(end)
    if sys.byteorder == 'big':
        numbers.byteswap()
    write(options.output + '.table', ''.join(map(line_of, table)).encode())
    write(options.output, numbers.tobytes())
    mode = f"--tokens uint{32 if options.uint32 else 16} --vocab {len(table)} --table {options.output}.table"
    print(f'{options.output}: {len(numbers)} tokens of {size} bytes')
    print(f"hybrid_train --data {options.output} {mode}{f' --end-token {end}' if end is not None else ''}")


def main():
    parser = argparse.ArgumentParser(prog='tokenize_text.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tokenizer', metavar='tokenizer.json')
    parser.add_argument('texts', metavar='TEXT', nargs='*')
    parser.add_argument('-o', dest='output', metavar='FILE')
    parser.add_argument('--end', metavar='TOKEN', help='token to put at the end of every text')
    parser.add_argument('--uint32', action='store_true')
    parser.add_argument('--encode', metavar='TEXT')
    options = parser.parse_args()
    if options.encode is None and not (options.texts and options.output):
        parser.error('give texts and -o FILE, or --encode TEXT')
    try:
        run(options)
    except Failure as failure:
        print(f'tokenize_text.py: {failure}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
