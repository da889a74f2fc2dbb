#!/usr/bin/env python3
"""Writes the CSV logs of hybrid_train as event files of TensorBoard:

    python3 tools/csv_to_tensorboard.py runs first.csv second.csv
    tensorboard --logdir runs

Each log becomes runs/NAME/events.out.tfevents.0.NAME, and replaces an earlier file of this program.  Every column
with numbers becomes a scalar of that name over steps; final_loss and held_out are separate, as in the log.  A run is
taken to end when its log was last written.  The column seconds then gives the wall time of each point.  Needs only
Python.
Status: 0 done, 1 a file cannot be read or written, 2 a bad command line."""
import argparse
import csv
import math
import os
import struct
import sys


class Failure(Exception):
    """An error in the input.  The program prints its text and ends with status 1."""


def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82f63b78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC = crc_table()


def masked_crc(data):
    """CRC-32C, rotated and moved as TFRecord has it."""
    crc = 0xffffffff
    for byte in data:
        crc = CRC[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xffffffff
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff


def record(data):
    length = struct.pack('<Q', len(data))
    return length + struct.pack('<I', masked_crc(length)) + data + struct.pack('<I', masked_crc(data))


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out + bytes([number]))


def field(number, data):
    """A field of bytes in a protobuf message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall_time, step, scalars=None):
    """tensorflow.Event: wall_time = 1, step = 2, file_version = 3 or summary = 5 of values (tag = 1, simple_value = 2)."""
    head = b'\x09' + struct.pack('<d', wall_time) + b'\x10' + varint(step)
    if scalars is None:
        return record(head + field(3, b'brain.Event:2'))
    values = b''.join(field(1, field(1, tag.encode()) + b'\x15' + struct.pack('<f', x)) for tag, x in scalars)
    return record(head + field(5, values))


def rows_of(name):
    """(step, seconds, [(column, number)]) of every row."""
    try:
        with open(name, encoding='utf-8-sig', newline='') as file:
            lines = [(n, line) for n, line in enumerate(file, 1) if line.strip() and not line.startswith('#')]
    except OSError as error:
        raise Failure(f'{name}: {error.strerror}') from None
    except UnicodeDecodeError:
        raise Failure(f'{name}: not a text file') from None
    heads = next(csv.reader([lines[0][1]])) if lines else []
    if 'step' not in heads:
        raise Failure(f"{name}: no column 'step': not a log of hybrid_train")
    for number, line in lines[1:]:
        fields = next(csv.reader([line]))
        if len(fields) != len(heads):
            raise Failure(f'{name}: line {number} has {len(fields)} fields, the header has {len(heads)}')
        numbers = {}
        for column, text in zip(heads, fields):
            if text:
                try:
                    numbers[column] = float(text)
                except ValueError:
                    raise Failure(f"{name}: line {number}: column '{column}': '{text}' is not a number") from None
        step = numbers.pop('step', math.nan)
        if not (step >= 0 and step == int(step)):
            raise Failure(f"{name}: line {number}: column 'step' is not a whole number")
        yield int(step), numbers.pop('seconds', 0.0), list(numbers.items())


def convert(name, folder):
    rows = list(rows_of(name))
    if not rows:
        raise Failure(f'{name}: no rows below the header')
    start = os.stat(name).st_mtime - rows[-1][1]
    data = event(start, 0) + b''.join(event(start + seconds, step, scalars) for step, seconds, scalars in rows)
    label = os.path.splitext(os.path.basename(name))[0]
    place = os.path.join(folder, label)
    path = os.path.join(place, f'events.out.tfevents.0.{label}')
    beside = f'{path}.{os.getpid()}'
    try:
        os.makedirs(place, exist_ok=True)
        with open(beside, 'wb') as file:
            file.write(data)
        os.replace(beside, path)
    except OSError as error:
        if os.path.exists(beside):
            os.remove(beside)
        raise Failure(f'{path}: {error.strerror}') from None
    return f'{path}: {len(rows)} steps'


def main():
    parser = argparse.ArgumentParser(prog='csv_to_tensorboard.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', metavar='FOLDER')
    parser.add_argument('logs', metavar='RUN.csv', nargs='+')
    options = parser.parse_args()
    labels = [os.path.splitext(os.path.basename(name))[0] for name in options.logs]
    if len(set(labels)) < len(labels):
        parser.error('two logs have the same file name; a run is named after its log, so rename one')
    try:
        for name in options.logs:
            print(convert(name, options.folder))
    except Failure as failure:
        print(f'csv_to_tensorboard.py: {failure}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
