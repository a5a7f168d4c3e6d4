"""The commands that start further Python processes of Rankless, with the flags of this interpreter."""

import os
import subprocess
import sys

# Not `-m`: that puts the current folder first on the path, where a user's `queue.py` would break torch's import.
_START = (
    "import sys; root = sys.argv[1]\n"
    "if not sys.flags.safe_path: del sys.path[0]\n"
    "if root not in sys.path: sys.path.append(root)\n"
    "from rankless.runtime.fast_exit import FastExit\n"
    "fast_exit = FastExit()\n"
    "from {module} import main\n"
    "work = main(fast_exit)\n"
    "if work is not None: work()\n"
)
_MODULE = (
    "import sys; root = sys.argv.pop(1)\n"
    "parent = int(sys.argv.pop(1))\n"
    "if not sys.flags.safe_path: del sys.path[0]\n"
    "if root not in sys.path: sys.path.append(root)\n"
    "from rankless.runtime.linux_process_control import end_with_parent\n"
    "end_with_parent(parent)\n"
    "from runpy import run_module\n"
    "run_module({module!r}, run_name='__main__', alter_sys=True)\n"
)
_COMMAND_LINE = (
    "import sys; root = sys.argv.pop(1)\n"
    "if not sys.flags.safe_path: del sys.path[0]\n"
    "if root not in sys.path: sys.path.append(root)\n"
    "from rankless.cli import main\n"
    "sys.exit(main())\n"
)
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))


def python_command(module: str) -> list[str]:
    """Return the command that imports `module` in a new interpreter, and calls its `main` and what that returns."""
    return [sys.executable, *interpreter_flags(), "-c", _START.format(module=module), _ROOT]


def module_command(module: str) -> list[str]:
    """Return the command that runs `module` in a new interpreter, as `python -m` would, while this process lives."""
    return [sys.executable, *interpreter_flags(), "-c", _MODULE.format(module=module), _ROOT, str(os.getpid())]


def rankless_command(*arguments: str) -> list[str]:
    """Return the command that runs `rankless` with these arguments in a new interpreter."""
    return [sys.executable, *interpreter_flags(), "-c", _COMMAND_LINE, _ROOT, *arguments]


def interpreter_flags() -> list[str]:
    """Return the flags of this interpreter, such as -O, -W and -X."""
    # Private, but multiprocessing itself uses it for its children.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # not in the stubs
    return [*flags, *(["-u"] if sys.flags.unbuffered else [])] if hasattr(sys.flags, "unbuffered") else flags
