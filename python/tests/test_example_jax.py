"""Tests of python/examples/hybrid_jax.py: it trains, and reads the model files of hybrid_train."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import jax
except ImportError:
    raise unittest.SkipTest("no JAX") from None

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "examples"))
import hybrid_jax  # noqa: E402

TEXT = os.path.join(HERE, "..", "..", "examples", "data", "fables.txt")


def tokens():
    with open(TEXT, "rb") as file:
        text = file.read()
    vocabulary = bytes(sorted(set(text)))
    return np.array([vocabulary.index(byte) for byte in text], np.int32), len(vocabulary)


class ExampleInJax(unittest.TestCase):
    def test_training(self):
        text, size = tokens()
        _, losses = hybrid_jax.train(hybrid_jax.create(3, size, 32, 2, 2, 2), text, 40, 4, 24)
        self.assertLess(abs(losses[0] - np.log(size)), 0.3)
        self.assertLess(sum(losses[-8:]) / 8, losses[0] - 1)

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
            model, vocabulary, about = hybrid_jax.load(path)
            text = b"A Fox once saw a Crow fly off with a piece of cheese in its beak"
            printed = subprocess.run([logits, path], input=text, stdout=subprocess.PIPE, check=True).stdout.decode()
        right = np.array([[float(x) for x in line.split()] for line in printed.splitlines()])
        with jax.default_matmul_precision("highest"):
            found = hybrid_jax.logits(model, np.array([[vocabulary.index(byte) for byte in text]], np.int32))[0]
        self.assertEqual(found.shape, right.shape)
        self.assertLess(np.linalg.norm(np.asarray(found, np.float64) - right) / np.linalg.norm(right), 2e-6)
        held_out = float(re.search(r"^held-out loss +([0-9.]+)$", run.stdout, re.M).group(1))
        self.assertAlmostEqual(hybrid_jax.held_out(model, tokens()[0], 4, 32), held_out, delta=1.1e-4)


if __name__ == "__main__":
    unittest.main()
