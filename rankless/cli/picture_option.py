"""The option `--picture` of `rankless plan`: the file for the picture of the plan."""

import argparse

from rankless.cli.json_output import require_different_files, require_writable_file
from rankless.errors import ConfigError
from rankless.plan_picture.picture_file import find_format

PICTURE_HELP = (
    "Draw the plan in this file: the mesh, who holds which module, what moves, and the memory. plan.svg is a picture, "
    "plan.html a page with tables too."
)


def read_picture_path(arguments: argparse.Namespace) -> str | None:
    """Return the file for the picture; None without one.

    Raises:
        ConfigError: It is of another kind, cannot be written, or is the file of another option.
    """
    path: str | None = arguments.picture
    if path is None:
        return None
    if find_format(path) is None:
        raise ConfigError(
            expected="--picture FILE with the extension .svg or .html",
            found=repr(path),
            fix="for example --picture plan.svg, before the script",
        )
    require_writable_file("--picture", path)
    require_different_files(
        {
            "--picture": path,
            "--json": arguments.json,
            "--save": arguments.save,
            "--plan": arguments.plan,
            "the script": arguments.script[0] if arguments.script else None,
        }
    )
    return path
