#!/usr/bin/env python3
"""compare_kernels.py OLD NEW: whether two cubins have the same kernels, machine code, registers and constants, by name.

For changes that must not change any kernel, such as moves.  Names are compared without the hash of the file that
internal linkage puts into them.  Make a cubin of each version with

    nvcc -std=c++17 -cubin -gencode=arch=compute_90a,code=sm_90a -DGT_WKV6_IMPLEMENTATION gt/impl/impl.cu -o OLD

and end with 0 if all kernels are the same, 1 if not, 2 if a file is no cubin.
"""
import re
import struct
import subprocess
import sys

SECTION = '<IIQQQQIIQQ'  # name, type, flags, address, offset, size, link, info, alignment, size of an entry
NO_BITS, SYMBOLS = 8, 2
PARAMETERS = 0x0a  # attribute of .nv.info that begins with the index of a symbol


def fail(text):
    print(f'compare_kernels.py: {text}', file=sys.stderr)
    sys.exit(2)


def text_at(table, offset):
    return table[offset:table.index(b'\0', offset)].decode()


def read_sections(path):
    """Sections of the ELF file by name, as (header, contents), and the names of its symbols."""
    try:
        with open(path, 'rb') as file:
            data = file.read()
    except OSError as error:
        fail(error)
    if data[:5] != b'\x7fELF\x02':
        fail(f'{path}: not a 64-bit ELF file')
    start, = struct.unpack_from('<Q', data, 0x28)
    size, count, names_at = struct.unpack_from('<HHH', data, 0x3a)
    headers = [struct.unpack_from(SECTION, data, start + i * size) for i in range(count)]

    def contents(header):
        return b'' if header[1] == NO_BITS else data[header[4]:header[4] + header[5]]

    names = contents(headers[names_at])
    sections = {text_at(names, header[0]): (header, contents(header)) for header in headers}
    symbols = []
    for header in headers:
        if header[1] == SYMBOLS:
            table, strings = contents(header), contents(headers[header[6]])
            symbols = [text_at(strings, struct.unpack_from('<I', table, i)[0]) for i in range(0, len(table), 24)]
    return sections, symbols


def without_hash(name):
    return re.sub(r'\d+_INTERNAL_[0-9a-f]+_\d+_\w*?_cu_[0-9a-f]+(_\d+)?', 'INTERNAL', name)


def attributes(data):
    """The attributes of .nv.info, without the symbol's index, which depends on the order of kernels."""
    found, i = [], 0
    while i + 4 <= len(data):
        form, attribute, size = struct.unpack_from('<BBH', data, i)
        i += 4
        value = size
        if form == 4:
            value = data[i:i + size]
            i += size
            if attribute == PARAMETERS:
                value = value[4:]
        found.append((form, attribute, value))
    return found


def relocations(data, size, symbols):
    found = []
    for i in range(0, len(data), size):
        offset, info = struct.unpack_from('<QQ', data, i)
        added = struct.unpack_from('<q', data, i + 16)[0] if size == 24 else 0
        found.append((offset, info & 0xffffffff, without_hash(symbols[info >> 32]), added))
    return sorted(found)


def read_kernels(path):
    """{kernel or function: {kind: contents}}"""
    sections, symbols = read_sections(path)
    kernels = {}
    for name, (header, data) in sections.items():
        match = re.fullmatch(r'\.(text|nv\.info|nv\.constant\d+|nv\.shared|rel\.text|rela\.text)\.(.+)', name)
        if not match:
            continue
        kind, kernel = match.groups()
        if kind == 'text':
            data = (header[7] >> 24, data)  # registers
        elif kind == 'nv.info':
            data = attributes(data)
        elif kind == 'nv.shared':
            data = header[5]
        elif kind.startswith('rel'):
            data = relocations(data, 24 if kind.startswith('rela') else 16, symbols)
        kernels.setdefault(without_hash(kernel), {})[kind] = data
    if not kernels:
        fail(f'{path}: no kernels')
    return kernels


def demangled(names):
    try:
        done = subprocess.run(['c++filt'], input='\n'.join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}
    return dict(zip(names, done.stdout.split('\n')))


def main():
    if sys.argv[1:] in (['-h'], ['--help']):
        print(__doc__)
        return
    if len(sys.argv) != 3:
        fail('two cubins are needed: OLD NEW')
    old, new = read_kernels(sys.argv[1]), read_kernels(sys.argv[2])
    names = sorted(old.keys() | new.keys())
    readable = demangled(names)
    different = 0
    for name in names:
        if name not in old or name not in new:
            print(f'only in {sys.argv[1] if name in old else sys.argv[2]}: {readable[name]}')
            different += 1
            continue
        kinds = [kind for kind in sorted(old[name].keys() | new[name].keys())
                 if old[name].get(kind) != new[name].get(kind)]
        if kinds:
            print(f'{readable[name]}: different {", ".join(kinds)}')
            different += 1
    print(f'{len(names) - different} kernels and functions are the same, {different} are not')
    sys.exit(different > 0)


main()
