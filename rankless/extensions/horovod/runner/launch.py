"""`horovod.runner.launch`: horovodrun as a function, for programs that start jobs themselves."""

import os
import sys
from typing import NoReturn

from rankless.runtime.subprocess_command import rankless_command


def run_commandline() -> NoReturn:
    """Replace this process by `rankless horovodrun` with the same arguments."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = rankless_command("horovodrun", *sys.argv[1:])
    os.execv(command[0], command)


if __name__ == "__main__":
    run_commandline()
