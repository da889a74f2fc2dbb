#!/usr/bin/env python3
"""single.py FOLDER DEPFILE HEADER...: writes a self-contained one-file version of each HEADER into FOLDER.  A HEADER is
a header or a C file.  DEPFILE lists the files that were read, in the syntax of make.

The program replaces each #include "..." line by the contents of the named file, once per file; #include <...> lines
stay.  It decides by conditions and include guards, not by names of files.

  - If a file is inlined again, the part inside its include guard (#ifndef X, then #define X) is left out if X is known
    to be defined.  Other conditions on macros that the text has defined are decided in the same way.
  - A file may be needed by several conditional parts, none of which is always compiled.  It then stands before the
    first of these parts, under a condition that is true if the condition of any of them is.
  - A file that is still being inlined is left out, because the rest of it follows later.
  - A HEADER may include other HEADERs if it contains their implementation.  If the target does not include such a
    HEADER itself, the #include line stays, because the one-file version of that HEADER is in the same FOLDER.
  - If a file is not found, its #include line also stays, because the file belongs to another project.
"""
import os
import re
import sys
import textwrap

DIRECTIVE = re.compile(r'\s*#\s*([a-z]+)\b[ \t]*(.*)', re.S)
INCLUDE = re.compile(r'"([^"]+)"')


class Conditional:
    """#if ... #endif, with branches [directive, condition, children].  guard: the macro X of an include guard, or None.
    before, end: the text around the block, which moves with it."""

    def __init__(self):
        self.branches = []
        self.guard = None
        self.before = self.end = ''


def without_comments(text):
    return ' '.join(re.sub(r'/\*.*?\*/|//[^\n]*|\\\n', ' ', text, flags=re.S).split())


def logical_lines(text):
    """Pairs of a line and whether the line begins outside of comments.  Continued lines are joined."""
    lines, inside, held = [], False, ''
    for line in text.splitlines(keepends=True):
        held += line
        if not inside and line.endswith('\\\n'):
            continue
        lines.append((held, not inside))
        position = 0
        code = re.sub(r'"(\\.|[^"\\\n])*"', lambda m: '"' * len(m.group()), held)
        while True:
            if not inside:
                line_comment = code.find('//', position)
                position = code.find('/*', position)
                if position < 0 or 0 <= line_comment < position:
                    break
            else:
                position = code.find('*/', position)
                if position < 0:
                    break
            inside = not inside
            position += 2
        held = ''
    return lines


def parse(path):
    """The file as a list of lines, (keyword, value, line) for directives, and Conditionals."""
    with open(path, encoding='utf-8') as file:
        text = file.read()
    top = []
    stack = [(None, top)]
    for line, in_code in logical_lines(text):
        match = DIRECTIVE.match(line) if in_code else None
        if not match:
            stack[-1][1].append(line)
            continue
        keyword, value = match.group(1), without_comments(match.group(2))
        if keyword in ('if', 'ifdef', 'ifndef'):
            block = Conditional()
            condition = {'if': f'({value})', 'ifdef': f'defined({value})', 'ifndef': f'!defined({value})'}[keyword]
            block.branches.append([line, condition, []])
            stack[-1][1].append(block)
            stack.append((block, block.branches[0][2]))
        elif keyword in ('elif', 'else'):
            block = stack.pop()[0]
            denied = ' && '.join('!' + branch[1].split(' && ')[-1] for branch in block.branches)
            condition = denied + (f' && ({value})' if keyword == 'elif' else '')
            block.branches.append([line, condition, []])
            stack.append((block, block.branches[-1][2]))
        elif keyword == 'endif':
            stack.pop()[0].end = line
        else:
            stack[-1][1].append((keyword, value, line))
    if len(stack) != 1:
        sys.exit(f'{path}: an #if has no #endif')
    for node in top:
        mark_guard(node)
    return top


def mark_guard(node):
    """Marks include guards: the Conditional, if it is one, and those inside it."""
    if not isinstance(node, Conditional):
        return
    match = re.fullmatch(r'!defined\((\w+)\)', node.branches[0][1])
    if match and len(node.branches) == 1:
        code = [child for child in node.branches[0][2] if not isinstance(child, str) or without_comments(child)]
        # #ifndef X, #define X, #endif sets a default, and is no include guard
        if len(code) > 1 and isinstance(code[0], tuple) and code[0][:2] == ('define', match.group(1)):
            node.guard = match.group(1)
    for branch in node.branches:
        for child in branch[2]:
            mark_guard(child)


def either(alternatives):
    """A condition that is true if all conditions of one alternative are true.  '' if it is always true."""
    reduced = []
    for conditions in alternatives:
        terms = [disjuncts(condition) for condition in dict.fromkeys(conditions)]
        # beside "A", the condition "A or B" adds nothing
        terms = [term for term in terms if not any(set(other) < set(term) for other in terms)]
        if terms not in reduced:
            reduced.append(terms)
    common = [term for term in reduced[0] if all(term in terms for terms in reduced)]
    rest = [[term for term in terms if term not in common] for terms in reduced]
    if all(rest):
        common.insert(0, [conjunction(terms) for terms in rest])
    return conjunction(common)


def disjuncts(condition):
    inner = re.fullmatch(r'\((.*)\)', condition)
    parts = inner.group(1).split(' || ') if inner else [condition]
    simple = all(re.fullmatch(r'!?defined\(\w+\)', part) for part in parts)
    return parts if simple else [condition]


def conjunction(terms):
    """A condition that is true if in each of the terms, which are lists, one condition is true."""
    if len(terms) == 1:
        return ' || '.join(terms[0])
    return ' && '.join(term[0] if len(term) == 1 else '(' + ' || '.join(term) + ')' for term in terms)


def under(condition, blocks):
    if not condition:
        return blocks
    out = Conditional()
    out.end = '#endif\n'
    lines = textwrap.wrap(f'#if {condition}', 100, subsequent_indent='    ', break_on_hyphens=False)
    out.branches.append([' \\\n'.join(lines) + '\n', f'({condition})', blocks])
    return [out]


class Amalgamation:
    def __init__(self, target, headers):
        self.target = os.path.abspath(target)
        self.headers = {os.path.abspath(header) for header in headers}
        self.root = os.path.commonpath(map(os.path.dirname, self.headers)) # the folder for the compiler's option -I
        self.parsed = {}
        self.named = {self.find(value, self.target) for value in self.includes(self.parse(self.target))}
        self.tree = self.inline(self.target, set(), [])
        self.hoist(self.tree)

    def parse(self, path):
        if path not in self.parsed:
            self.parsed[path] = parse(path)
        return self.parsed[path]

    def includes(self, nodes):
        for node in nodes:
            if isinstance(node, Conditional):
                for branch in node.branches:
                    yield from self.includes(branch[2])
            elif isinstance(node, tuple) and node[0] == 'include':
                yield node[1]

    def find(self, value, includer):
        match = INCLUDE.match(value)
        for folder in (os.path.dirname(includer), self.root) if match else ():
            path = os.path.normpath(os.path.join(folder, match.group(1)))
            if os.path.isfile(path):
                return path
        return None

    # ---- inlining: files replace their #include lines ----

    def inline(self, path, known, stack):
        """The nodes of the file if the macros in `known` are defined.  Adds the macros of the file to `known`."""
        return self.copy(self.parse(path), path, known, stack + [path])

    def copy(self, nodes, path, known, stack):
        out = []
        for node in nodes:
            if isinstance(node, Conditional):
                out += self.copy_conditional(node, path, known, stack)
            elif isinstance(node, tuple):
                keyword, value, line = node
                if keyword == 'define' and re.fullmatch(r'\w+', value.split(' ')[0]):
                    known.add(value.split(' ')[0])
                elif keyword == 'undef':
                    known.discard(value)
                if keyword == 'include':
                    out += self.copy_include(value, line, path, known, stack)
                else:
                    out.append(node)
            else:
                out.append(node)
        return out

    def copy_include(self, value, line, path, known, stack):
        file = self.find(value, path)
        if not file:
            return [('include', value, line)]
        if file in stack:
            return []
        if file in self.headers and path in self.headers and file not in self.named:
            name = os.path.relpath(file, self.root)
            return [('include', value, f'#include "{name}"\n')]
        nodes = self.inline(file, known, stack)
        code = [node for node in nodes if not isinstance(node, str)]
        if not code:
            return [] # all of it was inlined before
        name = os.path.relpath(file, self.root)
        begin, end = f'\n/* ======== {name} ======== */\n', f'/* ======== end of {name} ======== */\n'
        guard = code[0]
        first = nodes.index(guard)
        if not isinstance(guard, Conditional) or not guard.guard: # the guarded part and its comment were inlined before
            return [begin] + nodes[first:] + [end]
        guard.before = begin + ''.join(nodes[:first])
        guard.end += end
        return nodes[first:]

    def copy_conditional(self, node, path, known, stack):
        match = re.fullmatch(r'(!?)\(?defined\(?\s*(\w+)\)?\)?', node.branches[0][1])
        if match and match.group(2) in known: # the condition is known
            if not match.group(1):
                return self.copy(node.branches[0][2], path, known, stack)
            if len(node.branches) == 1:
                return []
        out = Conditional()
        out.guard, out.end = node.guard, node.end
        for line, condition, nodes in node.branches:
            inner = set(known)
            out.branches.append([line, condition, self.copy(nodes, path, inner, stack)])
            known &= inner # a macro that a branch undefines is no longer known
        if node.guard:
            known |= inner # defined by this file or before
        return [out]

    # ---- files that several conditional parts need ----

    def guarded(self, node, conditions):
        """Pairs of an include guard in the node and the conditions around it.  Files come before those that need them."""
        if not isinstance(node, Conditional):
            return
        for _, condition, nodes in node.branches:
            inner = conditions if node.guard else conditions + (condition,)
            for child in nodes:
                yield from self.guarded(child, inner)
        if node.guard:
            yield node, conditions

    def hoist(self, nodes):
        found = {} # guard: [(index of the child, Conditional, conditions)]; a file that another needs comes first
        for index, child in enumerate(nodes):
            for block, conditions in self.guarded(child, ()):
                found.setdefault(block.guard, []).append((index, block, conditions))
        shared = {guard: places for guard, places in found.items() if len({place[0] for place in places}) > 1}
        before = {} # index: [(condition, blocks)]
        for guard, places in shared.items():
            first, block, _ = places[0]
            groups = before.setdefault(first, [])
            condition = either([place[2] for place in places])
            if not groups or groups[-1][0] != condition:
                groups.append((condition, []))
            groups[-1][1].append(block)
            self.check_order(guard, nodes[first:places[-1][0]], places)
        self.remove(nodes, set(shared))
        for places in shared.values():
            for branch in places[0][1].branches:
                self.remove(branch[2], set(shared))
        for index in sorted(before, reverse=True):
            nodes[index:index] = [node for group in before[index] for node in under(*group)]
        for node in nodes:
            if isinstance(node, Conditional):
                for branch in node.branches:
                    self.hoist(branch[2])

    def check_order(self, guard, nodes, places):
        """Fails if the nodes define or undefine a macro of the conditions, because that would change their meaning."""
        used = set(re.findall(r'\w+', ' '.join(' '.join(place[2]) for place in places))) - {'defined'}
        defined = used & set(self.defined(nodes))
        if defined:
            sys.exit(f'{self.target}: {guard} is needed under a condition on {", ".join(sorted(defined))}, but the '
                     'library defines this macro before the condition')

    def defined(self, nodes):
        for node in nodes:
            if isinstance(node, Conditional):
                for branch in node.branches:
                    yield from self.defined(branch[2])
            elif isinstance(node, tuple) and node[0] in ('define', 'undef'):
                yield re.match(r'\w*', node[1]).group()

    def remove(self, nodes, guards):
        nodes[:] = [node for node in nodes if not (isinstance(node, Conditional) and node.guard in guards)]
        for node in nodes:
            if isinstance(node, Conditional):
                for branch in node.branches:
                    self.remove(branch[2], guards)

    # ---- text ----

    def text(self, nodes=None):
        out = ''
        for node in self.tree if nodes is None else nodes:
            if isinstance(node, Conditional):
                out += node.before + ''.join(branch[0] + self.text(branch[2]) for branch in node.branches) + node.end
            else:
                out += node[2] if isinstance(node, tuple) else node
        return out


def main():
    if len(sys.argv) < 4:
        sys.exit('usage: single.py FOLDER DEPFILE HEADER...')
    folder, depfile, headers = sys.argv[1], sys.argv[2], sys.argv[3:]
    os.makedirs(folder, exist_ok=True)
    written, read = [], {os.path.abspath(__file__)}
    for header in headers:
        one_file = Amalgamation(header, headers)
        written.append(os.path.join(folder, os.path.basename(header)))
        read |= set(one_file.parsed)
        with open(written[-1], 'w', encoding='utf-8') as file:
            file.write(one_file.text())
    with open(depfile, 'w', encoding='utf-8') as file:
        file.write(' '.join(written) + ': ' + ' '.join(path.replace(' ', '\\ ') for path in sorted(read)) + '\n')


if __name__ == '__main__':
    main()
