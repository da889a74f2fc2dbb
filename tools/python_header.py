"""python_header.py gt_kernels.h OUTPUT: makes the Python package's part of the C API from the header, when the package
is built: constants, structs and functions for ctypes.  A declaration that it does not understand ends the build."""

import re
import sys

NUMBERS = {"int": "c_int", "int64_t": "c_int64", "size_t": "c_size_t", "float": "c_float",
           "gt_xla_function": "c_void_p"}
IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"


def fail(text):
    sys.exit(f"python_header.py: cannot parse this declaration: {' '.join(text.split())}")


def ctype(text, enums, structs):
    """The ctypes type of a C type without a name, such as "const float *"."""
    words = text.replace("*", " * ").split()
    base = [word for word in words if word not in ("const", "*")]
    if len(base) != 1 or words.count("*") > 1:
        fail(text)
    if "*" in words:
        return {"char": "c_char_p"}.get(base[0], f"POINTER({base[0]})" if base[0] in structs else "c_void_p")
    if base[0] in enums:
        return "c_int"
    if base[0] in structs:
        return base[0]
    return NUMBERS.get(base[0]) or fail(text)


def struct_fields(body, enums, structs):
    """(name, ctypes type) of every field, in their order."""
    for declaration in body.split(";")[:-1]:
        match = re.fullmatch(rf"\s*((?:const\s+)?{IDENTIFIER})\s*([^;]+)", declaration)
        names = match and [name.strip() for name in match.group(2).split(",")]
        if not match or not all(re.fullmatch(rf"\*?\s*{IDENTIFIER}", name) for name in names):
            fail(declaration)
        for name in names:
            pointer = name.startswith("*")
            yield name.lstrip("* "), "c_void_p" if pointer else ctype(match.group(1), enums, structs)


def generate(header):
    version = {part: int(number) for part, number in
               re.findall(r"^#define GT_VERSION_(MAJOR|MINOR|PATCH) (\d+)$", header, re.M)}
    symbol = re.search(r"^#define GT_SYMBOL\(name\) gt_##name##(\w+)$", header, re.M)
    names = re.findall(r"^#define (gt_\w+) GT_SYMBOL\((\w+)\)$", header, re.M)
    if len(version) != 3 or not symbol or not names:
        sys.exit("python_header.py: the header lacks GT_VERSION_... or GT_SYMBOL")
    symbols = {name: f"gt_{word}{symbol.group(1)}" for name, word in names}
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)

    out = ['"""Made from gt_kernels.h by tools/python_header.py when this package was built."""', "",
           "from ctypes import (POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p)", "",
           f"VERSION = {version['MAJOR'] * 10000 + version['MINOR'] * 100 + version['PATCH']}",
           f"VERSION_TEXT = '{version['MAJOR']}.{version['MINOR']}.{version['PATCH']}'", ""]

    enums = []
    for name, body in re.findall(r"typedef enum (gt_\w+) \{(.*?)\} \1;", text, re.S):
        enums.append(name)
        for entry in filter(None, (entry.strip() for entry in body.split(","))):
            if not re.fullmatch(r"GT_\w+ = \d+", entry):
                fail(entry)
            out.append(entry)
    structs = []
    pointers = ["gt_stream"]  # an opaque pointer: a CUDA stream
    for name, body in re.findall(r"typedef struct (gt_\w+) \{(.*?)\} \1;", text, re.S):
        out += ["", "", f"class {name}(Structure):", "    _fields_ = ["]
        out += [f"        ('{field}', {kind})," for field, kind in struct_fields(body, enums, structs)]
        out.append("    ]")
        structs.append(name)
    if text.count("typedef enum ") != len(enums) or text.count("typedef struct ") != len(structs) + len(pointers):
        sys.exit("python_header.py: cannot parse an enum or struct of the header")

    out += ["", "", "# what a function is called in the library, what it returns and takes", "FUNCTIONS = {"]
    declared = re.findall(rf"^GT_(?:REF_|XLA_)?FUNCTION ([^;(]*?)({IDENTIFIER})\(([^)]*)\);", text, re.M)
    for returns, name, arguments in declared:
        kinds = []
        for argument in arguments.split(","):
            if argument.strip() == "void":
                continue
            match = re.fullmatch(rf"(.*?)({IDENTIFIER})", argument.strip(), re.S)
            kind = match.group(1).strip() if match else fail(argument)
            kinds.append("c_void_p" if kind in pointers else ctype(kind, enums, structs))
        if name not in symbols:
            fail(name)
        out.append(f"    '{name}': ('{symbols[name]}', {ctype(returns, enums, structs)}, [{', '.join(kinds)}]),")
    if sorted(name for _, name, _ in declared) != sorted(symbols):
        sys.exit("python_header.py: some functions are declared without a symbol, or have a symbol "
             "without a declaration")
    out += ["}", ""]
    return "\n".join(out)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        result = generate(file.read())
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(result)
