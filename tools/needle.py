#!/usr/bin/env python3
"""Writes tokens for a test of retrieval: keys and their values lie in filler, and are asked for later.

    python3 tools/needle.py train -o train.u16 --tokens 30000000 --most 2048
    hybrid_train --data train.u16 --tokens uint16 --vocab 195 --seq 2048 --save model.st ...
    python3 tools/needle.py score -o score.u16 --lengths 1024,4096,32768
    hybrid_train --eval model.st --val score.u16 --score score.u16.csv

FILE holds little-endian numbers of 16 bits.  A needle is "NEEDLE key value value", a question "ASK key", and its answer
both values.  A document begins with END.  Filler consists of 32 sentences of 8 words, drawn at random, which a model
soon predicts; so it then has to learn mostly the answers.

A document for training has --needles needles and as many questions, at random places of a length between --least and
--most tokens; long and short documents fill equal shares.  A question asks for a needle before it.  With
few --keys and --values a small model learns sooner, and guesses more: a guess is right once in VALUES x VALUES.  A document for
scoring has one needle, at a share of the filler that --depths gives in percent, and one question at the end.
FILE.csv names each: length, depth, place of its first token, tokens of the prompt, tokens of the answer.

Status: 0 done, 1 a number does not fit or a file cannot be written, 2 a bad command line."""
import argparse
import array
import os
import random
import sys

from tokenize_text import Failure, write

END, NEEDLE, ASK = range(3)
KEYS, VALUES, WORDS = 64, 64, 64
FIRST_KEY, FIRST_VALUE, FIRST_WORD = 3, 3 + KEYS, 3 + KEYS + VALUES
VOCABULARY = 3 + KEYS + VALUES + WORDS
SENTENCES, SENTENCE = 32, 8
ANSWER = 2                           # tokens of a value
NEEDLE_SIZE, ASK_SIZE = 2 + ANSWER, 2 + ANSWER
LEAST = 1 + NEEDLE_SIZE + ASK_SIZE   # tokens of a document for scoring


def sentences():
    """The same in every file, whatever its seed."""
    draw = random.Random(0)
    return [[FIRST_WORD + draw.randrange(WORDS) for _ in range(SENTENCE)] for _ in range(SENTENCES)]


class Writer:
    def __init__(self, options):
        self.random, self.sentences, self.tokens = random.Random(options.seed), sentences(), array.array('H')
        self.keys, self.values = options.keys, options.values

    def filler(self, count):
        left = count
        while left > 0:
            self.tokens.extend(self.random.choice(self.sentences)[:left])
            left -= SENTENCE

    def pairs(self, count):
        """Keys that differ, each with a value."""
        return [(FIRST_KEY + key, [FIRST_VALUE + self.random.randrange(self.values) for _ in range(ANSWER)])
                for key in self.random.sample(range(self.keys), count)]

    def gaps(self, count, total):
        """Numbers that add up to the total."""
        cuts = sorted(self.random.randint(0, total) for _ in range(count - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total])]

    def train_document(self, length, needles):
        """Puts needles and questions in random order; at any place there are at least as many needles before it."""
        events, left = [], {'needle': needles, 'ask': needles}
        while left['needle'] + left['ask']:
            is_first = left['needle'] == needles
            choices = [kind for kind in left for _ in range(left[kind]) if not (is_first and kind == 'ask')]
            kind = self.random.choice(choices)
            left[kind] -= 1
            events.append(kind)
        pairs, known = self.pairs(needles), []
        self.tokens.append(END)
        for kind, gap in zip(events, self.gaps(len(events), length - 1 - needles * (NEEDLE_SIZE + ASK_SIZE))):
            self.filler(gap)
            if kind == 'needle':
                known.append(pairs[len(known)])
            key, value = known[-1] if kind == 'needle' else self.random.choice(known)
            self.tokens.extend([NEEDLE if kind == 'needle' else ASK, key, *value])

    def score_document(self, length, depth):
        filler = length - LEAST
        before = filler * depth // 100
        (key, value), = self.pairs(1)
        self.tokens.append(END)
        self.filler(before)
        self.tokens.extend([NEEDLE, key, *value])
        self.filler(filler - before)
        self.tokens.extend([ASK, key, *value])

    def bytes(self):
        if sys.byteorder == 'big':
            self.tokens.byteswap()
        return self.tokens.tobytes()


def train(options):
    writer, least = Writer(options), 1 + options.needles * (NEEDLE_SIZE + ASK_SIZE)
    if options.least < least:
        raise Failure(f'--least {options.least}: must be at least {least}, the tokens of {options.needles} needles '
                      'and questions')
    if options.needles > options.keys:
        raise Failure(f'--needles {options.needles}: must be at most --keys {options.keys}')
    if options.most < options.least:
        raise Failure(f'--most {options.most}: must be at least --least {options.least}')
    while len(writer.tokens) < options.tokens:
        # a length has a share of the documents that is inverse to its square: so lengths have equal shares of tokens
        share = writer.random.random()
        length = round(1 / ((1 - share) / options.least + share / options.most))
        writer.train_document(length, options.needles)
    write(options.output, writer.bytes())
    print(f'{options.output}: {len(writer.tokens)} tokens\n'
          f'hybrid_train --data {options.output} --tokens uint16 --vocab {VOCABULARY} --save MODEL')


def score(options):
    writer, rows = Writer(options), ['length,depth,first,prompt,answer']
    for length in options.lengths:
        if length < LEAST:
            raise Failure(f'--lengths: {length}: must be at least {LEAST}, the tokens of a needle and its question')
    for depth in options.depths:
        if depth > 100:
            raise Failure(f'--depths: {depth}: must be at most 100 percent')
    for length in options.lengths:
        for depth in options.depths:
            for _ in range(options.samples):
                rows.append(f'{length},{depth},{len(writer.tokens)},{length - ANSWER},{ANSWER}')
                writer.score_document(length, depth)
    write(options.output, writer.bytes())
    write(options.output + '.csv', ''.join(f'{row}\n' for row in rows).encode())
    print(f'{options.output}: {len(rows) - 1} documents, {len(writer.tokens)} tokens\n'
          f'hybrid_train --eval MODEL --val {options.output} --score {options.output}.csv')


def whole(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{number}: must be at least 1')
    return number


def numbers(text):
    found = [int(word) for word in text.split(',')]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f'{min(found)}: must not be negative')
    return found


def main():
    parser = argparse.ArgumentParser(prog='needle.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument('--keys', type=whole, default=KEYS, choices=range(1, KEYS + 1), metavar='N',
                        help=f'number of different keys, at most {KEYS}')
    shared.add_argument('--values', type=whole, default=VALUES, choices=range(1, VALUES + 1), metavar='N',
                        help=f'number of different tokens in values, at most {VALUES}')
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    command = commands.add_parser('train', parents=[shared], help='write documents for training')
    command.set_defaults(run=train)
    command.add_argument('--tokens', type=whole, default=30000000, help='least number of tokens in the file')
    command.add_argument('--least', type=whole, default=64, help='tokens of the shortest document')
    command.add_argument('--most', type=whole, default=2048, help='tokens of the longest document')
    command.add_argument('--needles', type=whole, default=4, choices=range(1, KEYS + 1), metavar='N')
    command.add_argument('--seed', type=int, default=1)
    command.add_argument('-o', dest='output', metavar='FILE', required=True)
    command = commands.add_parser('score', parents=[shared], help='write documents with one question each, for --score')
    command.set_defaults(run=score)
    command.add_argument('--lengths', type=numbers, default=[1024, 2048, 4096, 8192, 16384, 32768], metavar='N,N,...')
    command.add_argument('--depths', type=numbers, default=[0, 25, 50, 75, 100], metavar='N,N,...')
    command.add_argument('--samples', type=whole, default=20, help='number of documents of each length and depth')
    command.add_argument('--seed', type=int, default=2)
    command.add_argument('-o', dest='output', metavar='FILE', required=True)
    options = parser.parse_args()
    try:
        options.run(options)
    except Failure as failure:
        print(f'needle.py: {failure}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
