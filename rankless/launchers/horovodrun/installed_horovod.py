"""What a job needs in which an installed Horovod may be imported, and not Rankless's."""

import contextlib
import importlib
import os
from collections.abc import Iterator

from rankless.config import environment
from rankless.config.run_config import Program, RunConfig
from rankless.launchers.horovodrun.run_config import is_this_python
from rankless.runtime.hooks.import_aliases import install


@contextlib.contextmanager
def rendezvous_port(config: RunConfig, address: str) -> Iterator[int | None]:
    """The port of a server at which a real Horovod's ranks meet, on host 0; None for a job that needs none."""
    if config.horovod is None or not may_be_imported(config.program):
        yield None
        return
    # Not at the top: its server, of the standard library, costs every launcher 20 ms that most jobs need not pay.
    server = importlib.import_module("rankless.launchers.horovodrun.rendezvous_server")
    with server.rendezvous_server(address) as port:
        yield port


def may_be_imported(program: Program) -> bool:
    """Whether `import horovod` may be a real one: there is one here, or the program is another Python's, whose packages
    nobody has looked at.
    """
    if install().is_real_package("horovod"):
        return True
    is_python = program.kind == "command" and os.path.basename(program.target).startswith("python")
    return is_python and environment.horovod_choice() == "missing" and not is_this_python(program.target)
