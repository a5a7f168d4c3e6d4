"""Do all ranks have the same program? If not, nothing runs, and the first difference is named."""

from itertools import zip_longest

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.errors import ProgramMismatch
from rankless.parallel.mesh import Mesh


def require_same_program(program: LogicalProgram, mesh: Mesh) -> None:
    """Return if every rank captured this program; else raise `ProgramMismatch` on every rank."""
    text = program.text()
    digests = all_gather_bytes(program.digest().encode(), mesh=mesh)
    if len(set(digests)) == 1:
        return
    texts = [data.decode() for data in all_gather_bytes(text.encode(), mesh=mesh)]
    other = next(rank for rank, item in enumerate(texts) if item != texts[0])
    ours, theirs = find_first_difference(texts[0], texts[other])
    raise ProgramMismatch(
        expected=f"job {program.name!r} to be the same program on every rank; on rank 0 it has: {ours}",
        found=f"on rank {other}: {theirs}",
        fix="make the script do the same on every rank; branch on rankless.rank() only outside jobs",
        where=extract_line(theirs) or extract_line(ours),
    )


def find_first_difference(one: str, other: str) -> tuple[str, str]:
    """The first lines in which two texts differ."""
    pairs = zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing more")
    return next((left, right) for left, right in pairs if left != right)


def extract_line(text: str) -> str | None:
    """The line of the user's script at the end of a program's line."""
    _, mark, line = text.rpartition("  # ")
    return line if mark and line else None
