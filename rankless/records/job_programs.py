"""What jobs became on several workers: one file per run, written by rank 0, a line of JSON for every fact."""

from collections.abc import Iterator
from pathlib import Path

import msgspec


class ProgramInputRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a program takes, and how it lies on the workers."""

    kind: str
    """"parameter", "buffer", "argument" or "constant" (read by the job from outside its models and arguments)."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Of the whole tensor."""
    placement: str
    """"whole on every worker", or "dim 0 split 5+5"."""


class ProgramCommunication(msgspec.Struct, frozen=True, kw_only=True):
    """A value that moves between workers at every call."""

    kind: str
    value: str
    bytes: int
    """Of the whole value."""
    sent_bytes: int
    """What one worker sends, when the collective goes round a ring."""
    line: str
    reason: str
    overlapped: bool
    """Whether it travels while the program goes on."""


class ReplicatedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that no rule can split: its inputs are gathered and every worker computes it whole."""

    operator: str
    line: str


class JobProgram(msgspec.Struct, frozen=True, kw_only=True, tag="program"):
    """A job after lowering, for one kind of call. `moves` are in the order in which they start."""

    job: str
    line: str
    trains: bool
    workers: int
    operators: int
    """How many operators the whole program has, forward and backward."""
    inputs: tuple[ProgramInputRecord, ...]
    moves: tuple[ProgramCommunication, ...]
    gathered: tuple[ReplicatedOperator, ...]


class KnownJob(msgspec.Struct, frozen=True, kw_only=True, tag="known"):
    """A job that the script had defined when the run ended, and whether it had called it."""

    job: str
    line: str
    called: bool


ProgramRecord = JobProgram | KnownJob


def programs_file(folder: str) -> Path:
    """Where rank 0 writes."""
    return Path(folder) / "jobs.programs"


def encode_program_record(fact: ProgramRecord) -> bytes:
    """A fact as a line of the file."""
    return msgspec.json.encode(fact) + b"\n"


def read_program_records(folder: str) -> Iterator[ProgramRecord]:
    """The facts of a run; none if it has written none."""
    file = programs_file(folder)
    if file.exists():
        decoder = msgspec.json.Decoder(ProgramRecord)
        for line in file.read_bytes().splitlines():
            yield decoder.decode(line)
