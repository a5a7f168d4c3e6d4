"""`rankless checkpoint export`: write the models and tables of a checkpoint into safetensors files."""

import argparse
import importlib
import re

from rankless.config.extensions import import_declared, list_extensions
from rankless.errors import ConfigError

NAME = "checkpoint"
HELP = (
    "Write the models of a checkpoint into a safetensors file, for programs that know no Rankless. A table is there as "
    "`ids` and `rows`. Tensors are read in parts. Exit code: 0; 2 if nothing was exported."
)
DEFAULT_SIZE = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("action", choices=("export",), help="What to do with the checkpoint.")
    parser.add_argument("folder", metavar="FOLDER", help="Checkpoint that rankless.save wrote, such as run/step-100.")
    parser.add_argument(
        "--to", metavar="FILE", required=True, help="File to write, FILE.safetensors. It must not exist yet."
    )
    parser.add_argument(
        "--objects",
        metavar="NAME,NAME",
        help="Names of the saved objects to export, as in rankless.save(…, NAME=…). Default: all modules.",
    )
    parser.add_argument(
        "--optimizer-states",
        action="store_true",
        help="Export the states of optimizers too: those of tables as `states`, and those of saved optimizers.",
    )
    parser.add_argument(
        "--max-file-size",
        metavar="SIZE",
        default=DEFAULT_SIZE,
        help="Write several files and FILE.safetensors.index.json if the tensors are larger, such as 500MB. "
        f"Default: {DEFAULT_SIZE}.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Export the checkpoint, and say what was written."""
    most_bytes = parse_size(arguments.max_file_size)
    objects = None if arguments.objects is None else _split(arguments.objects)
    export = importlib.import_module("rankless.checkpoint.safetensors_export")
    state_counts = _read_state_counts()
    choice = export.ExportChoice(objects=objects, with_states=arguments.optimizer_states, state_counts=state_counts)
    result = export.export_checkpoint(arguments.folder, arguments.to, choice, most_bytes=most_bytes)
    tensors = "1 tensor" if result.tensors == 1 else f"{result.tensors:,} tensors"
    print(f"rankless: {tensors}, {result.tensor_bytes:,} bytes, in {', '.join(map(str, result.files))}")
    if result.left_out:
        print(f"rankless: not exported: {', '.join(result.left_out)}")
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB or 2GiB. Raises ConfigError for another text."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?B|[KMG]IB|)", text.strip().upper())
    unit = "" if found is None or found[2] == "B" else found[2]
    size = 0 if found is None else int(float(found[1]) * _UNITS[unit])
    if size < 1:
        raise ConfigError(
            expected="--max-file-size with a number of bytes, such as 500MB, 5GB or 2GiB",
            found=repr(text),
            fix=f"leave it out for {DEFAULT_SIZE}",
        )
    return size


def _read_state_counts() -> dict[str, int]:
    """Return how many states a row of a table has, by the name of the optimizer that steps it."""
    counts = [
        import_declared(each.name, "saved_rows", each.saved_rows, name="STATE_COUNTS")
        for each in list_extensions()
        if each.saved_rows
    ]
    return {name: count for each in counts for name, count in each.items()}


def _split(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(
            expected="--objects with different names, separated by commas", found=repr(text), fix="such as model,ema"
        )
    return names
