"""The titles of Rankless's processes in `ps`, `top`, `nvidia-smi` and the like: job, part in the job, and rank.

The titles need the package `setproctitle` and Linux. Without either, processes keep their command lines.

The short title, which the kernel keeps and `top` shows, has no space: Slurm finds the processes of a task in
/proc/PID/stat, where that title stands, and takes its words for other fields. A task with a space in it gets no signal.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType

from rankless.config.environment import kept_in_place
from rankless.config.run_config import Program

setproctitle: ModuleType | None
try:
    import setproctitle
except ImportError:  # a title is a convenience: no job fails without one
    setproctitle = None

PREFIX = "rankless: "
_MAX_NAME_CHARACTERS = 60
_ROUND = ", now "
_CHILD = ", child process"


def name_program(program: Program) -> str:
    """Return a program's short name: the file, the module, the command, or "-c"."""
    name = "-c" if program.kind == "code" else program.target
    name = name if program.kind == "module" else os.path.basename(os.path.normpath(name))
    # A name may have any character that a file system allows, and a title is one printable line.
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    return printable[:_MAX_NAME_CHARACTERS]


def show_agent(program: Program, part: str) -> None:
    """Title this process as an agent; `part` says which part of the job it is the agent of."""
    _set(f"{name_program(program)} {part}", short=f"agent {name_program(program)}")


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Give this process its title back at the end of the block, if that was text."""
    title = _title()
    if setproctitle is None or not title:
        yield
        return
    short = setproctitle.getthreadtitle()
    try:
        yield
    finally:
        setproctitle.setproctitle(title)
        setproctitle.setthreadtitle(short)


def show_fork_server(program: Program | None, *, from_pool: bool = False) -> None:
    """Title this process as the fork server of a run, or with None as a pool of fork servers."""
    origin = " from a pool" if from_pool else ""
    text = "fork server pool" if program is None else f"{name_program(program)} fork server{origin}"
    _set(text, short="fork server")


def show_role_process(title: str, index: int, count: int, *, short: str) -> None:
    """Title this process as one of a role, such as "clock 0 of 2", and in short "clock0"."""
    _set(f"{title} {index} of {count}", short=f"{short}{index}")


def show_spawn_server() -> None:
    """Title this process as the server that forks the processes of `rankless.spawn`."""
    _set("server of rankless.spawn", short="spawn server")


def show_worker(program_name: str, rank: int, world_size: int, *, is_elastic: bool = False) -> None:
    """Title this process as a worker. A process that it forks gets a title that says so.

    Args:
        program_name: What `name_program` returns.
        rank: The worker's rank; its number if the job is elastic.
        world_size: The number of workers; not shown for an elastic job.
        is_elastic: Whether ranks change from round to round; see `show_round`.
    """
    short = "worker" if is_elastic else "rank"
    part = f"worker {rank}" if is_elastic else f"rank {rank} of {world_size}"
    # `top` shows 15 characters.
    _set(f"{program_name} {part}", short=f"{short}{rank} {program_name}")
    os.register_at_fork(after_in_child=_show_child)


def is_of_worker(short: str) -> bool:
    """Return whether a short title is that of a worker. Threads have that of the process when they were started."""
    return re.match(r"(rank|worker)\d+-", short) is not None


def show_round(rank: int, world_size: int) -> None:
    """Add to the title of an elastic worker its rank in the current round."""
    title = _title()
    if title.startswith(PREFIX):  # the script may have set a title of its own
        _replace(f"{title.partition(_ROUND)[0]}{_ROUND}rank {rank} of {world_size}")


def _show_child() -> None:
    title = _title()
    if title.startswith(PREFIX) and not title.endswith(_CHILD):
        _replace(title + _CHILD)


def _title() -> str:
    """Return the title of this process; "" if it has none that is text."""
    if setproctitle is None or sys.platform != "linux":
        return ""
    try:
        return str(setproctitle.getproctitle())
    except UnicodeDecodeError:  # an argument of the command may have any bytes
        return ""


def _replace(title: str) -> None:
    """Change the title, and keep the short one that `top` shows."""
    assert setproctitle is not None
    short = setproctitle.getthreadtitle()
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle(short)


def _set(text: str, *, short: str) -> None:
    if setproctitle is None or sys.platform != "linux":
        return
    with kept_in_place():
        setproctitle.setproctitle(PREFIX + text)
    setproctitle.setthreadtitle("-".join(short.split()))
