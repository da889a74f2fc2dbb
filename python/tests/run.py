"""Runs the tests of the installed package: all, or those whose names contain an argument.  The last line counts them.
Under GT_TEST_STRICT a skipped test counts as failed, unless it was skipped for lack of a GPU or of PyTorch."""

import os
import re
import sys
import unittest

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = here  # so that the installed package is imported
    loader = unittest.TestLoader()
    if len(sys.argv) > 1:
        loader.testNamePatterns = [f"*{word}*" for word in sys.argv[1:]]
    result = unittest.TextTestRunner(verbosity=2).run(loader.discover(here))
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = result.skipped
    if os.environ.get("GT_TEST_STRICT"):
        unwanted = [reason for _, reason in skipped if not re.match("no (GPU|PyTorch)", reason)]
        failed += len(unwanted)
        skipped = skipped[: len(skipped) - len(unwanted)]
        for reason in unwanted:
            print(f"FAILED: skipped: {reason}")
    passed = result.testsRun - failed - len(skipped)
    print(f"{passed} passed, {failed} failed, {len(skipped)} skipped")
    sys.exit(failed > 0 or passed == 0)
