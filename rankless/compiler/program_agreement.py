"""Check that all ranks captured the same program, and report the first difference if not."""

import hashlib
from itertools import zip_longest

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.errors import ProgramMismatch, RanksDiverged
from rankless.parallel.mesh import Mesh


def require_same_program(program: LogicalProgram, mesh: Mesh) -> None:
    """Return if every rank captured this program, and draws the same numbers from the script's generators.

    Otherwise raise `ProgramMismatch` or `RanksDiverged` on every rank.
    """
    text = program.text()
    digests = all_gather_bytes(program.digest().encode() + digest_generators(program), mesh=mesh)
    if len(set(digests)) == 1:
        return
    texts = [data.decode() for data in all_gather_bytes(text.encode(), mesh=mesh)]
    if len(set(texts)) == 1:
        rank = next(rank for rank, item in enumerate(digests) if item != digests[0])
        raise RanksDiverged(
            expected=f"generators of the script, which job {program.name!r} draws from, in one state on every rank",
            found=f"rank {rank} has another state than rank 0",
            fix="seed them with the same number on every rank",
            where=next((node.meta.get("line") for node in program.graph.nodes if "generator" in node.meta), None),
        )
    other = next(rank for rank, item in enumerate(texts) if item != texts[0])
    ours, theirs = find_first_difference(texts[0], texts[other])
    raise ProgramMismatch(
        expected=f"job {program.name!r} to be the same program on every rank; rank 0 has: {ours}",
        found=f"on rank {other}: {theirs}",
        fix="run the same code on every rank; branch on rankless.rank() only outside jobs",
        where=extract_line(theirs) or extract_line(ours),
    )


def digest_generators(program: LogicalProgram) -> bytes:
    """Return a digest of the states of the script's generators that a program draws from."""
    digest = hashlib.blake2b(digest_size=8)
    for generator in program.generators:
        digest.update(generator.get_state().numpy().data)
    return digest.digest()


def find_first_difference(one: str, other: str) -> tuple[str, str]:
    """Return the first pair of lines in which two texts differ."""
    pairs = zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing more")
    return next((left, right) for left, right in pairs if left != right)


def extract_line(text: str) -> str | None:
    """Return the script line at the end of a program's line, or None if it has none."""
    _, mark, line = text.rpartition("  # ")
    return line if mark and line else None
