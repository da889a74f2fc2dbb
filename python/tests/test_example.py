"""Tests of python/examples/hybrid.py: it trains like the same model in plain operations, and it is the model of
hybrid_train."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "examples"))
import hybrid  # noqa: E402
import plain  # noqa: E402

import gt_kernels.torch as gt  # noqa: E402

TEXT = os.path.join(HERE, "..", "..", "examples", "data", "fables.txt")


def tokens():
    with open(TEXT, "rb") as file:
        text = file.read()
    vocabulary = bytes(sorted(set(text)))
    return torch.tensor([vocabulary.index(byte) for byte in text]), len(vocabulary)


class Example(unittest.TestCase):
    def test_reaches_the_loss_of_plain_operations(self):
        text, size = tokens()
        runs = []
        for ops in (gt, plain):
            torch.manual_seed(3)
            model = hybrid.Hybrid(ops, size, 32, 2, 2, 2)
            runs.append(hybrid.train(model, text, 40, 4, 24))
        first, last = [run[0] for run in runs], [sum(run[-8:]) / 8 for run in runs]
        self.assertAlmostEqual(first[0], first[1], delta=1e-5)
        self.assertLess(last[0], first[0] - 1)
        self.assertAlmostEqual(last[0], last[1], delta=2e-3)

    def test_bf16(self):
        text, size = tokens()
        torch.manual_seed(3)
        model = hybrid.Hybrid(gt, size, 32, 1, 2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            losses = hybrid.train(model, text, 40, 4, 24)
        self.assertLess(sum(losses[-4:]) / 4, losses[0] - 0.5)

    def test_model_file_of_hybrid_train(self):
        build = os.environ.get("GT_TEST_BUILD", "")
        trainer, logits = os.path.join(build, "examples", "hybrid_train"), os.path.join(build, "tests", "logits")
        if not (os.path.exists(trainer) and os.path.exists(logits)):
            self.skipTest("no hybrid_train and tests/logits in the folder GT_TEST_BUILD")
        try:
            import safetensors  # noqa: F401
        except ImportError:
            self.skipTest("no safetensors")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.st")
            run = subprocess.run([trainer, "--device", "cpu", "--data", TEXT, "--hidden", "32", "--layers", "2", "--steps",
                                  "12", "--batch", "4", "--seq", "32", "--sample", "0", "--save", path],
                                 stdout=subprocess.PIPE, text=True, check=True)
            model, vocabulary, about = hybrid.load(gt, path)
            text = b"A Fox once saw a Crow fly off with a piece of cheese in its beak"
            printed = subprocess.run([logits, path], input=text, stdout=subprocess.PIPE, check=True).stdout.decode()
        right = torch.tensor([[float(x) for x in line.split()] for line in printed.splitlines()], dtype=torch.float64)
        with torch.no_grad():
            found = model(torch.tensor([[vocabulary.index(byte) for byte in text]]))[0].double()
        self.assertEqual(found.shape, right.shape)
        self.assertLess(((found - right).norm() / right.norm()).item(), 2e-6)
        held_out = float(re.search(r"^held-out loss +([0-9.]+)$", run.stdout, re.M).group(1))
        text, _ = tokens()
        self.assertAlmostEqual(hybrid.held_out(model, text, 4, 32), held_out, delta=1.1e-4)


if __name__ == "__main__":
    unittest.main()
