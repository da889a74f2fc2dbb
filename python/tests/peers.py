"""peers.py FOLDER [--every N] [--part I/N] [--device DEVICE]: runs the test suites of the public packages against
gt_kernels.compat.

FOLDER holds copies of the repositories causal-conv1d, mamba and flash-linear-attention.  The script runs their tests
with the functions under test replaced by those of gt_kernels.compat.  The references of the tests stay: PyTorch
operations, and for RWKV-6 the package's other function, in Triton.  --every N runs one test in N, always the same ones.
--part I/N runs every N-th of these, starting with number I (from 0), so that N processes can share the work.  A refusal
counts as a failure.  Prints the share of each suite that passes, and the reasons of failures.
"""

import argparse
import collections
import os
import sys
import tempfile
import types
import zlib
from unittest import mock

SUITES = (  # the suite, its file, the module whose functions are replaced, the functions
    ("causal-conv1d", "causal-conv1d/tests/test_causal_conv1d.py", "causal_conv1d.causal_conv1d_interface",
     ("causal_conv1d_fn", "causal_conv1d_update")),
    ("selective_scan", "mamba/tests/ops/test_selective_scan.py", "mamba_ssm.ops.selective_scan_interface",
     ("selective_scan_fn",)),
    ("selective_state_update", "mamba/tests/ops/triton/test_selective_state_update.py",
     "mamba_ssm.ops.triton.selective_state_update", ("selective_state_update",)),
    ("layernorm_gated", "mamba/tests/ops/triton/test_layernorm_gated.py", "mamba_ssm.ops.triton.layernorm_gated",
     ("layernorm_fn", "rmsnorm_fn")),
    ("rwkv6, chunk", "flash-linear-attention/tests/ops/test_rwkv6.py", "fla.ops.rwkv6.chunk", ("chunk_rwkv6",)),
    ("rwkv6, fused_recurrent", "flash-linear-attention/tests/ops/test_rwkv6.py", "fla.ops.rwkv6.fused_recurrent",
     ("fused_recurrent_rwkv6",)),
)
OTHERS = {  # tests in these files for functions that gt_kernels.compat does not have
    "test_mamba_inner_fn": "mamba_inner_fn", "test_causal_conv1d_get_states": "causal_conv1d_varlen_states",
    "test_causal_conv1d_bwd_default_mode_is_not_reproducible": "that results do not repeat",
}


def package(name, path):
    """Makes a package without running its __init__.py."""
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
    if "." in name:
        parent, child = name.rsplit(".", 1)
        setattr(sys.modules[parent], child, module)
    return module


def prepare(folder):
    import importlib

    from gt_kernels import compat
    for name in ("causal_conv1d_cuda", "selective_scan_cuda"):
        sys.modules[name] = mock.MagicMock()
    package("causal_conv1d", f"{folder}/causal-conv1d/causal_conv1d")
    for name in ("", ".ops", ".ops.triton", ".utils"):
        package(f"mamba_ssm{name}", f"{folder}/mamba/mamba_ssm{name.replace('.', '/')}")
    for name in ("", ".ops", ".ops.rwkv6"):
        package(f"fla{name}", f"{folder}/flash-linear-attention/fla{name.replace('.', '/')}")
    sys.modules["fla"].__version__ = "0" # other files of fla read the version
    return importlib, compat


def run_suite(folder, suite, every, part, device):
    import pytest
    title, path, replaced, functions = suite
    importlib, compat = prepare(folder)
    module = importlib.import_module(replaced)
    for function in functions:
        setattr(module, function, getattr(compat, function))
    if title.startswith("rwkv6"):
        for name in ("chunk", "fused_recurrent"):
            function = f"{name}_rwkv6"
            setattr(sys.modules["fla.ops.rwkv6"], function,
                    getattr(importlib.import_module(f"fla.ops.rwkv6.{name}"), function))

    class Counter:
        def __init__(self):
            self.outcomes, self.reasons = collections.Counter(), collections.Counter()

        def pytest_collection_modifyitems(self, config, items):
            mine = [item for item in items if item.originalname not in OTHERS]
            kept = [item for item in mine if zlib.crc32(item.name.encode()) % every == 0]
            self.outcomes["of"] = len(mine)
            items[:] = kept[part[0]::part[1]]

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[report.outcome] += 1
                if report.outcome == "failed":
                    lines = str(report.longrepr).strip().splitlines()
                    errors = [line for line in lines if line.startswith("E ")] or lines[-1:]
                    self.reasons[f"{report.location[2].split('[')[0]}: {errors[0][:110]}"] += 1

    counter = Counter()
    with open(f"{folder}/{path}", encoding="utf-8") as file:
        source = file.read()
    with tempfile.TemporaryDirectory() as scratch:
        name = f"{scratch}/test_{title.replace(', ', '_').replace('-', '_')}.py"
        with open(name, "w", encoding="utf-8") as file:
            file.write(source if device == "cuda" else source.replace('"cuda"', f'"{device}"')
                       .replace("'cuda'", f"'{device}'"))
        pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", "-rN", "--rootdir", scratch, name],
                    plugins=[counter])
    return counter


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--part", type=lambda text: [int(number) for number in text.split("/")], default=[0, 1])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--suite", help="only suites with this in their name")
    args = parser.parse_args()
    rows = []
    for suite in SUITES:
        if args.suite and args.suite not in suite[0]:
            continue
        try:
            counter = run_suite(os.path.abspath(args.folder), suite, args.every, args.part, args.device)
        except ImportError as error:
            rows.append((suite[0], f"not run: {error}", collections.Counter()))
            continue
        ran = counter.outcomes["passed"] + counter.outcomes["failed"]
        rows.append((suite[0], f"{counter.outcomes['passed']} of {ran} pass ({counter.outcomes['skipped']} skip themselves; "
                     f"the suite has {counter.outcomes['of']})", counter.reasons))
    print("\n==== the packages' tests on gt_kernels.compat")
    for title, text, reasons in rows:
        print(f"{title:<24} {text}")
        for reason, count in reasons.most_common(6):
            print(f"{'':<24}   {count} x {reason}")


if __name__ == "__main__":
    main()
