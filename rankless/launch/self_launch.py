"""`rankless.configure`: a plain `python train.py` becomes the launcher of its own script.

Note [two runs of the script's beginning]: the code before `configure` runs once in the process that becomes the
launcher, and again in every worker, where `configure` returns at once. The process is replaced, not forked: signals,
exit code, terminal and process id are those of the command that the user typed.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from rankless.config import environment
from rankless.config.hosts_and_addresses import Endpoint, parse_host_settings
from rankless.config.run_config import Program, ProgramKind
from rankless.errors import ConfigError
from rankless.runtime.subprocess_command import rankless_command
from rankless.user_code import running_ipython

_KINDS: Mapping[str, ProgramKind] = {"c": "code", "m": "module"}
_SCRIPTS_WITHOUT_FILE = ("<string>", "<stdin>")
"""The names of the code of `python -c` and of a script from standard input."""
_LONG_OPTION = "--check-hash-based-pycs"
"""Python's only long option that takes a separate value."""


@dataclass(frozen=True, kw_only=True)
class ScriptHosts:
    """The hosts of a job as a script names them. The user starts the script on each."""

    hosts: Sequence[Any]
    port: int | None = None
    insecure: bool = False

    def options(self, devices_per_host: int) -> list[str]:
        """Return the equivalent options of `rankless run`."""
        hosts = parse_host_settings(self.hosts, workers_per_host=devices_per_host)
        options = ["--no-ssh", "--hosts", ",".join(str(Endpoint(host.address)) for host in hosts)]
        options += [] if self.port is None else ["--port", str(self.port)]
        return [*options, "--insecure" if self.insecure else "--token-by-ssh"]


def relaunch(devices_per_host: int, hosts: ScriptHosts | None = None) -> None:
    """Replace this process by `rankless run -n devices_per_host` of the running script.

    Returns in the workers of that run, and where one process is enough. Raises `ConfigError` if no script runs that
    could be started again. Call `require_script` first.
    """
    if not isinstance(devices_per_host, int) or isinstance(devices_per_host, bool) or devices_per_host < 1:
        raise ConfigError(
            expected="devices_per_host= as a number of workers, from 1 up",
            found=f"devices_per_host={devices_per_host!r}",
            fix="pass the number of devices of this host to use",
        )
    if environment.is_launched():
        _warn_of_overridden_count(devices_per_host)
    elif (devices_per_host > 1 or hosts is not None) and multiprocessing.parent_process() is None:
        options = [] if hosts is None else hosts.options(devices_per_host)
        main_file = getattr(sys.modules["__main__"], "__file__", None)
        _become_launcher(devices_per_host, running_program(sys.orig_argv, main_file), options)


def require_script() -> None:
    """Raise `ConfigError` if a person types the code into this process: its state would be lost with the process.

    A command line does not tell: `python -m ipykernel_launcher` runs a module, and IPython's %run runs a file.
    """
    session = find_session()
    if session is not None and not environment.is_launched():
        raise ConfigError(
            expected="a script, started as `python train.py`: this process becomes its launcher",
            found=f"{session}, which would end with all that is defined in it",
            fix="start workers from there by rankless.spawn(function, args, nprocs=4)",
        )


def find_session() -> str | None:
    """Return the kind of interactive session that this process is, for an error text, or None for a script."""
    shell = running_ipython()
    if shell is not None:
        return "a notebook" if hasattr(shell, "kernel") else "an IPython session"
    if hasattr(sys, "ps1") or sys.flags.interactive or "idlelib.run" in sys.modules:
        return "the interactive interpreter"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Consoles compile what is typed under such names: "<console>", "<input>", "<doctest page.md[0]>".
        file = frame.f_code.co_filename
        typed = frame.f_globals.get("__name__") in ("__main__", "__console__") and file not in _SCRIPTS_WITHOUT_FILE
        if typed and file.startswith("<"):
            return f"a console ({file})"
        frame = frame.f_back
    return None


def running_program(command: Sequence[str], main_file: str | None) -> Program:
    """Return the program that this interpreter runs; `command` is `sys.orig_argv`, `main_file` the script's file.

    Raises `ConfigError` for a script from standard input.
    """
    rest = list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        for index, letter in enumerate(option) if not option.startswith("--") else ():
            if letter in "cmWX":
                value = option[index + 1 :] or (rest.pop(0) if rest else "")
                if letter in "cm":
                    return Program(kind=_KINDS[letter], target=value, arguments=tuple(rest))
                break
        if option == _LONG_OPTION and rest:
            rest.pop(0)
    if not rest or rest[0] == "-" or main_file is None:
        raise ConfigError(
            expected="a script, started as `python train.py`: this process becomes its launcher",
            found="a script read from standard input",
            fix="write the script to a file; or start workers by rankless.spawn(function, args, nprocs=4)",
        )
    # The script may have changed the working folder, or be a folder with a __main__.py.
    is_found = os.path.isfile(rest[0]) and os.path.samefile(rest[0], main_file)
    return Program(kind="script", target=rest[0] if is_found else main_file, arguments=tuple(rest[1:]))


def _become_launcher(count: int, program: Program, options: Sequence[str]) -> NoReturn:
    option = {"script": [], "module": ["-m"], "code": ["-c"]}[program.kind]
    command = ["run", "-n", str(count), *options, *option, program.target, *program.arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, rankless_command(*command))


def _warn_of_overridden_count(devices_per_host: int) -> None:
    config = environment.read_worker_config()
    if (
        config is not None
        and config.rank == 0
        and config.recording is None
        and config.local_world_size != devices_per_host
    ):
        print(
            f"rankless: rankless.configure(devices_per_host={devices_per_host}) is overridden by the command line's "
            f"-n {config.local_world_size}",
            file=sys.stderr,
            flush=True,
        )
