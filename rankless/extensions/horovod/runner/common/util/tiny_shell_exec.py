"""A command in a shell, with its output as text."""

import subprocess
import traceback
from collections.abc import Mapping


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return the output and the exit code of a command, or None if it could not be started.

    Args:
        command: The command, for a shell.
        env: Its environment. Default this process's.
    """
    try:
        done = subprocess.run(
            command,
            shell=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError:
        traceback.print_exc()
        return None
    return done.stdout, done.returncode
