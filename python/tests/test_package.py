"""Tests of the import, of the C API through ctypes, and of libraries that the package must refuse."""

import copy
import ctypes
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import gt_kernels
from gt_kernels import _header, c

has_torch = importlib.util.find_spec("torch") is not None


class Package(unittest.TestCase):
    def test_version(self):
        self.assertRegex(gt_kernels.__version__, r"^\d+\.\d+\.\d+$")
        self.assertEqual(c.gt_version(), c.VERSION)

    def test_every_struct_has_a_size_function(self):
        structs = [name for name in dir(_header) if name.endswith("_args")]
        self.assertGreaterEqual(len(structs), 7)
        for name in structs:
            self.assertEqual(getattr(c, name + "_size")(), ctypes.sizeof(getattr(c, name)))

    def test_neither_torch_nor_numpy_is_needed(self):
        code = "import sys, gt_kernels.c; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_a_call(self):
        def floats(*values):
            return (ctypes.c_float * len(values))(*values)

        ones, decay, y = floats(1, 1, 1, 1), floats(-1, -1, -1, -1), floats(0, 0, 0, 0)
        address = ctypes.addressof
        args = c.gt_wkv6_args(B=1, T=4, H=1, N=1, decay=c.GT_DECAY_LOG, r=address(ones), k=address(ones),
                              w=address(decay), v=address(ones), y=address(y))
        c.check(c.gt_ref_wkv6_forward(ctypes.byref(args)))
        for got, expected in zip(y, (0.0, 1.0, 1.3679, 1.5032)):  # the numbers in README
            self.assertAlmostEqual(got, expected, places=4)

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, r"gt_ref_wkv6_forward: B = -1") as caught:
            c.check(c.gt_ref_wkv6_forward(c.gt_wkv6_args(B=-1)))
        self.assertIsInstance(caught.exception, gt_kernels.ArgumentError)
        self.assertEqual(caught.exception.status, c.GT_ERROR_SIZE)

    def test_errors_survive_pickling(self):
        for kind in (gt_kernels.Error, gt_kernels.ArgumentError, gt_kernels.UnsupportedError):
            for again in (pickle.loads(pickle.dumps(kind(104, "text"))), copy.copy(kind(104, "text"))):
                self.assertEqual((type(again), again.status, str(again)), (kind, 104, "text"))

    def test_editable_installation(self):
        """In an editable installation the library is among the package's resources, not next to its source."""
        code = """
import importlib.machinery, importlib.util, pathlib, sys
source, resources = map(pathlib.Path, sys.argv[1:])
class Reader:
    def files(self):
        return resources
class Loader(importlib.machinery.SourceFileLoader):
    def get_resource_reader(self, name):
        return Reader()
file = str(source / "__init__.py")
spec = importlib.util.spec_from_file_location("gt_kernels", file, loader=Loader("gt_kernels", file),
                                              submodule_search_locations=[str(source)])
module = sys.modules["gt_kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
        with tempfile.TemporaryDirectory() as folder:
            here = os.path.dirname(c.__file__)
            for name in ("__init__.py", "c.py", "_header.py", "_build.py"):
                shutil.copy(os.path.join(here, name), folder)
            subprocess.run([sys.executable, "-c", code, folder, here], check=True)

    def test_source_folder(self):
        """An import from the source folder says that the package is not installed, instead of failing in a circular
        import."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "gt_kernels"))
            for name in ("__init__.py", "c.py"):
                shutil.copy(os.path.join(os.path.dirname(c.__file__), name), os.path.join(folder, "gt_kernels"))
            done = subprocess.run([sys.executable, "-c", "import gt_kernels"], cwd=folder, capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": folder})
            self.assertRegex(done.stderr.splitlines()[-1], "^ImportError: gt_kernels: the source folder of the package has no library")

    def test_what_is_installed(self):
        done = subprocess.run([sys.executable, "-m", "gt_kernels"], capture_output=True, text=True, check=True)
        said = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", done.stdout, re.M))
        self.assertEqual(set(said), {"version", "library", "kernels", "GPU architectures", "device", "CPU twins", "torch",
                                     "jax"})
        self.assertTrue(said["version"].startswith(gt_kernels.__version__))
        self.assertTrue(os.path.exists(said["library"]))
        self.assertEqual(said["kernels"], c.kernels())

    def test_a_missing_kernel(self):
        """The error says why a kernel is missing, and what a user of pip can do."""
        build = c._build
        with unittest.mock.patch.multiple(build, NVCC="", WHY_NONE="no nvcc was on the PATH"):
            text = c.advice(c.GT_ERROR_NO_CUDA, "gt_ssd_forward: built without CUDA: compile the file")
            self.assertRegex(text, "^gt_ssd_forward: kernels of this installation: none, because no nvcc was on the PATH .* "
                                   "To install kernels for this device, put nvcc on the PATH and run \"pip install --force-reinstall --no-cache-dir .\"")
        with unittest.mock.patch.multiple(build, NVCC="13.0", ARCHITECTURES="90a", ARCHITECTURES_WHY="as said"):
            text = c.advice(c.GT_ERROR_ARCH, "gt_ssd_forward: no kernel")
            self.assertRegex(text, r"^gt_ssd_forward: no kernel: kernels of this installation: for 90a \(as said\), "
                                   r"by nvcc 13.0\. .*"
                                   "setup-args=-Dgpu_archs=all")
        if c.gt_device_supported(-1) == c.GT_ERROR_NO_CUDA:
            with self.assertRaisesRegex(gt_kernels.UnsupportedError, "^gt_wkv6_forward: kernels of this installation"):
                c.check(c.gt_wkv6_forward(c.gt_wkv6_args(B=1, T=1, H=1, N=1), None))

    def test_modules(self):
        """The modules are available after `import gt_kernels`."""
        code = "import gt_kernels; gt_kernels.torch.wkv6; gt_kernels.compat; gt_kernels.nn" if has_torch else \
            "import gt_kernels; gt_kernels.c"
        subprocess.run([sys.executable, "-c", code], check=True)
        with self.assertRaisesRegex(AttributeError, "no attribute 'other'"):
            gt_kernels.other

    def test_a_struct_of_another_operator_is_refused(self):
        with self.assertRaises(ctypes.ArgumentError):
            c.gt_ref_wkv6_forward(c.gt_ssd_args())


@unittest.skipUnless(shutil.which("cc"), "no C compiler cc on PATH")
class OtherLibraries(unittest.TestCase):
    """Libraries that have the right symbols, but one fault each."""

    def build(self, wrong):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        lines = ["#include <stddef.h>"]
        for name, (symbol, _, _) in _header.FUNCTIONS.items():
            value = 0
            if name == "gt_version":
                value = c.VERSION
            elif name.endswith("_args_size"):
                value = ctypes.sizeof(getattr(c, name[: -len("_size")]))
            if name in wrong and wrong[name] is None:
                continue
            lines.append(f"size_t {symbol}(void) {{ return {wrong.get(name, value)}; }}")
        source, library = os.path.join(folder, "other.c"), os.path.join(folder, "other.so")
        with open(source, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return library

    def test_nothing_is_wrong(self):
        self.assertEqual(set(c.load(self.build({}))), set(_header.FUNCTIONS))

    def test_version(self):
        with self.assertRaisesRegex(ImportError, "has version 999"):
            c.load(self.build({"gt_version": 999}))

    def test_symbol(self):
        with self.assertRaisesRegex(ImportError, "is not that of this package"):
            c.load(self.build({"gt_norm_mix_forward": None}))

    def test_struct(self):
        size = ctypes.sizeof(c.gt_ssd_args)
        with self.assertRaisesRegex(ImportError, rf"gt_ssd_args has {size + 8} bytes .* but {size} in this package"):
            c.load(self.build({"gt_ssd_args_size": size + 8}))

    def test_no_library(self):
        with self.assertRaisesRegex(ImportError, "cannot load the library"):
            c.load("/nonexistent/libgt_kernels.so")


class Generator(unittest.TestCase):
    """tools/python_header.py on headers that it could misread.  Needs the source tree."""

    @classmethod
    def setUpClass(cls):
        root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
        cls.tool, header = os.path.join(root, "tools", "python_header.py"), os.path.join(root, "gt_kernels.h")
        if not os.path.exists(cls.tool):
            raise unittest.SkipTest("not beside the source tree")
        with open(header, encoding="utf-8") as file:
            cls.header = file.read()

    def run_tool(self, text):
        with tempfile.TemporaryDirectory() as folder:
            source, output = os.path.join(folder, "h.h"), os.path.join(folder, "h.py")
            with open(source, "w", encoding="utf-8") as file:
                file.write(text)
            done = subprocess.run([sys.executable, self.tool, source, output], capture_output=True, text=True)
            return done.returncode, done.stderr

    def test_the_header(self):
        self.assertEqual(self.run_tool(self.header), (0, ""))

    def test_what_it_does_not_know(self):
        for old, new in (("    int64_t B, T, H, N;\n", "    int64_t B, T, H, N[2];\n"),
                         ("    int64_t B, T, H, N;\n", "    uint32_t B;\n"),
                         ("    int64_t B, T, H, N;\n", "    int (*f)(void);\n"),
                         ("    GT_BF16 = 2,", "    GT_BF16 = 1 << 1,"),
                         ("GT_FUNCTION int gt_version(void);", "GT_FUNCTION double gt_version(void);"),
                         ("GT_FUNCTION int gt_version(void);", "")):
            self.assertIn(old, self.header)
            status, text = self.run_tool(self.header.replace(old, new, 1))
            self.assertNotEqual(status, 0, new)
            self.assertTrue(re.search("cannot parse|without a symbol", text), text)


if __name__ == "__main__":
    unittest.main()
