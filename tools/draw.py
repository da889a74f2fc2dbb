#!/usr/bin/env python3
"""Draws twenty comments, ten paragraphs of documents and ten messages, each with its place.

A fresh reader says in one sentence what each means, and marks every sentence that had to be read twice.  The same seed
draws the same places of the same commit.
"""

import argparse
import ast
import random
import re
import subprocess

SHORTEST = 40  # letters: shorter texts say too little to judge


def tracked(*patterns):
    listed = subprocess.run(['git', 'ls-files', *patterns], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if '/lab/' not in name]


def read(name):
    with open(name, encoding='utf-8') as file:
        return file.read()


def place(name, text, at):
    return f'{name}:{text.count(chr(10), 0, at) + 1}'


def plain(text):
    """One line, without the marks of comments."""
    return ' '.join(re.sub(r'(?m)^\s*(\*|//|#)+ ?', ' ', text).split())


def comments():
    for name in tracked('*.c', '*.h', '*.cuh', '*.cu', '*.cpp'):
        text = read(name)
        for match in re.finditer(r'/\*(.*?)\*/', text, re.S):
            if '----' not in match[1]:
                yield place(name, text, match.start()), plain(match[1])
    for name in tracked('*.py'):
        text = read(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node):
                yield f'{name}:{getattr(node, "lineno", 1)}', plain(ast.get_docstring(node))
    for name in tracked('*.sh', '*.build', '*.py', '.ci/run', '.ci/long'):
        text = read(name)
        for match in re.finditer(r'(?m)(^[ \t]*# .*\n)+', text):
            yield place(name, text, match.start()), plain(match[0])


def paragraphs():
    for name in tracked('*.md'):
        text = re.sub(r'(?ms)^[ \t]*```.*?^[ \t]*```', lambda match: '\n' * match[0].count('\n'), read(name))
        for match in re.finditer(r'[^\n]+\n(?:(?![-*|] |\d+\. )[^\n]+\n)*', text):
            if not re.match(r'\s*[|#!<]', match[0]):
                yield place(name, text, match.start()), ' '.join(match[0].split())


# A call that makes an error, a verdict of a test or a text of help, up to its first string, and the string.
MESSAGE = re.compile(r'''(?<!def )\b(?:\w*fail|fail_at|refuse|report|test_check|check|parser\.error|sys\.exit|'''
                     r'''raise \w+)\([^;"']*|help ?=\s*''')
STRING = re.compile(r'''\s*f?(?:"([^"\n]*)"|'([^'\n]*)')''')


def messages():
    for name in tracked('*.c', '*.h', '*.cuh', '*.cu', '*.py'):
        text = read(name)
        for match in MESSAGE.finditer(text):
            words, at = '', match.end()
            while part := STRING.match(text, at):
                words += part[1] if part[1] is not None else part[2]
                at = part.end()
            yield place(name, text, match.start()), words


def main():
    parser = argparse.ArgumentParser(prog='draw.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('seed', metavar='SEED', type=int, nargs='?', default=1, help='number that fixes the draw')
    seed = parser.parse_args().seed
    chance = random.Random(seed)
    for title, texts, count in (('comments', comments(), 20), ('paragraphs', paragraphs(), 10),
                                ('messages', messages(), 10)):
        drawn = chance.sample([entry for entry in texts if len(entry[1]) >= SHORTEST], count)
        print(f'{title}, seed {seed}')
        for where, text in sorted(drawn):
            print(f'\n{where}\n    {text}')
        print()


if __name__ == '__main__':
    main()
