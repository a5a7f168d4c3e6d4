"""Check that all ranks captured the same program, and report the first difference if not."""

import hashlib
from itertools import zip_longest

import msgspec

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.errors import ProgramMismatch, RanksDiverged
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack

Operations = list[tuple[str, str]]
"""The operations of a program as text, each with its line of the script; see `LogicalProgram.operations`."""


def require_same_program(program: LogicalProgram, mesh: Mesh) -> None:
    """Return if every rank captured this program, and draws the same numbers from the script's generators.

    Otherwise raise `ProgramMismatch` or `RanksDiverged` on every rank.
    """
    digests = all_gather_bytes(program.digest().encode() + digest_generators(program), mesh=mesh)
    if len(set(digests)) == 1:
        return
    own = encode_msgpack(program.operations())
    programs = [msgspec.msgpack.decode(data, type=Operations) for data in all_gather_bytes(own, mesh=mesh)]
    differences = ((rank, find_first_difference(programs[0], other)) for rank, other in enumerate(programs))
    other, difference = next((item for item in differences if item[1] is not None), (0, None))
    if difference is None:
        rank = next(rank for rank, item in enumerate(digests) if item != digests[0])
        raise RanksDiverged(
            expected=f"generators of the script, which job {program.name!r} draws from, in one state on every rank",
            found=f"rank {rank} has another state than rank 0",
            fix="seed them with the same number on every rank",
            where=next((node.meta.get("line") for node in program.graph.nodes if "generator" in node.meta), None),
        )
    (ours, our_line), (theirs, their_line) = difference
    raise ProgramMismatch(
        expected=f"job {program.name!r} to be the same program on every rank; rank 0 has: {ours}",
        found=f"on rank {other}: {theirs}",
        fix="run the same code on every rank; branch on rankless.rank() only outside jobs",
        where=their_line or our_line or None,
    )


def digest_generators(program: LogicalProgram) -> bytes:
    """Return a digest of the states of the script's generators that a program draws from."""
    digest = hashlib.blake2b(digest_size=8)
    for generator in program.generators:
        digest.update(generator.get_state().numpy().data)
    return digest.digest()


def find_first_difference(one: Operations, other: Operations) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the first operations in which two programs differ, each with its line; None if they are the same."""
    pairs = zip_longest(one, other, fillvalue=("nothing more", ""))
    return next(((left, right) for left, right in pairs if left[0] != right[0]), None)
