"""Checks of files that a command writes at its end, before it starts anything."""

import os
from collections.abc import Mapping
from pathlib import Path

from rankless.errors import ConfigError


def require_writable_file(option: str, path: str) -> None:
    """Raise `ConfigError` if a command could not write a file that an option names."""
    found = path
    if os.path.isdir(path):
        is_writable = False
    elif os.path.exists(path):
        is_writable = os.access(path, os.W_OK)
    else:
        problem = try_to_create(path)
        is_writable = problem is None
        found = f"{path}: {problem}"
    if not is_writable:
        raise ConfigError(
            expected=f"{option} FILE in an existing folder, with permission to write",
            found=found,
            fix="create the folder, or choose another file",
        )


def try_to_create(path: str) -> str | None:
    """Create a file and remove it again; return why that fails, or None.

    Permissions do not say all: a name may be too long, or a file system may take no files.
    """
    try:
        Path(os.path.realpath(path)).touch(exist_ok=False)
    except OSError as error:
        return error.strerror
    os.unlink(os.path.realpath(path))
    return None


def require_different_files(files: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` if two options name one file, of which the second would overwrite the first."""
    named: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = named.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(
                expected="a file of its own for each result",
                found=f"{path} for {other} and {option}",
                fix="name another file",
            )
