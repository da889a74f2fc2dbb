"""Tests of bench/peers.py and bench/plain.py without a GPU: their functions and models are right, and they find one that
is wrong."""

import argparse
import importlib.util
import os
import unittest
from unittest import mock

try:
    import torch  # noqa: F401
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import gt_kernels.torch as gt

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench")


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", os.path.join(BENCH, f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rows(unittest.TestCase):
    """Checks the functions in peers.py that work on rows, and its wkv6 loop, with gradients.  The tests run without
    torch.compile, because it takes too long."""

    def setUp(self):
        self.peers = load("peers")
        self.peers.DEVICE, self.peers.compiled = "cpu", lambda function: function
        self.peers.print = lambda *_, **__: None

    def wrong(self, *rows):
        return self.peers.check(argparse.Namespace(filter="", plain=False), {row: ["fwd", "bwd"] for row in rows})

    def test_results_and_gradients(self):
        self.assertEqual(self.wrong(
            ("rmsnorm_linear", "bf16", "M512 D128 O256"), ("rmsnorm_linear", "f32", "M512 D128 O256 layer"),
            ("norm_mix", "f16", "M512 D128"), ("norm_gate", "bf16", "M512 D128 RMS"),
            ("norm_gate", "f32", "M512 D128 heads of 32"), ("add_norm", "bf16", "M512 D4096"),
            ("wkv6", "bf16", "B1 T2048 H4 N16")), 0)

    def test_finds_a_wrong_function(self):
        with mock.patch.object(self.peers, "own", lambda name: lambda x, residual, gamma, reads_sum: gt.add_norm(
                x, residual, gamma.detach() * 1.05 + 0 * gamma)):
            self.assertEqual(self.wrong(("add_norm", "f32", "M512 D64")), 1)

    def test_bytes_of_backward(self):
        """add_norm's backward moves the sum, two gradients of results and one of inputs, gamma and its gradient."""
        case, = self.peers.cases_of("add_norm", "bf16", "M64 D32", argparse.Namespace(plain=False))
        self.assertEqual(case.backward_bytes, 8 * 64 * 32 + 4 * 32)


class Models(unittest.TestCase):
    def setUp(self):
        self.bench = load("plain")
        self.bench.print = lambda *_, **__: None

    def test_sides_agree(self):
        sides = {"gt_kernels.torch": gt, "plain PyTorch": self.bench.plain}
        self.assertEqual(self.bench.check(["HY", "RWKV-6 24x2048", "Mamba-2 130M"], sides), 0)

    def test_finds_a_wrong_side(self):
        class Wrong:
            def __getattr__(self, name):
                return getattr(gt, name)

            @staticmethod
            def norm_mix(a, b, gain_a, gain_b, residual):
                return gt.norm_mix(a, b, gain_a, gain_b * 1.01, residual)

        self.assertEqual(self.bench.check(["HY"], {"wrong": Wrong(), "plain PyTorch": self.bench.plain}), 1)

    def test_sizes(self):
        """Parameters: those of hybrid_train --plan, and about those in the names."""
        with torch.device("meta"):
            sizes = {name: sum(weight.numel() for weight in make(self.bench.plain, 1).parameters())
                     for name, (make, *_) in self.bench.MODELS.items()}
        self.assertEqual(sizes, {"HY": 3124192, "RWKV-6 24x2048": 1331361792, "HY 24x2048": 1945486848,
                                 "Mamba-2 130M": 128989632, "Mamba-2 1.4B": 1343757312, "Mamba-2 2.8B": 2702599680})


if __name__ == "__main__":
    unittest.main()
