"""Run a script in float64, as `rankless verify` runs it: `python in_float64.py SCRIPT [ARGUMENTS]`.

What the script writes to its standard error is left out: progress bars have rates, and a run shows it on its output.
"""

import contextlib
import io
import runpy
import sys

from rankless.runtime.hooks.float64_mode import enter_float64_mode

if __name__ == "__main__":
    enter_float64_mode()
    sys.argv = sys.argv[1:]
    with contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(sys.argv[0], run_name="__main__")
