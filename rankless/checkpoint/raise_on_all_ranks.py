"""A block of work at whose end all ranks know whether it succeeded on all of them."""

from types import TracebackType

import msgspec

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.sync_point_encoding import CHECKPOINTS
from rankless.errors import CheckpointError
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack


class OtherRankFailed(CheckpointError):
    """Raised on a rank that did not fail itself, but saw in the folder that another rank failed."""


class _RankOutcome(msgspec.Struct):
    """The result of one rank. `summary` must be equal on all ranks; `is_secondary` marks another rank's error."""

    error: str | None
    is_secondary: bool
    summary: str
    note: bytes


class Agreement:
    """A context at whose end every rank raises if any rank raised, or if their `summary` differs.

    Without it, the other ranks would wait in their next collective for a rank that raised. A rank that failed raises
    its own error, the others a `CheckpointError` that names it. `fix` is the advice for ranks that differ. Afterwards
    `notes` holds the `note` of every rank, in the order of ranks.
    """

    def __init__(self, *, mesh: Mesh, doing: str, fix: str = "make the same call on every rank") -> None:
        self._mesh = mesh
        self._doing = doing
        self._fix = fix
        self.summary = ""
        self.note = b""
        self.notes: list[bytes] = []

    def __enter__(self) -> "Agreement":
        self._mesh.check_sync_point(f"{CHECKPOINTS}to {self._doing}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._mesh.size == 1:
            self.notes = [self.note]
            return
        text = None if error is None else f"{type(error).__name__}: {str(error).strip()}"
        is_secondary = isinstance(error, OtherRankFailed)
        own_outcome = encode_msgpack(
            _RankOutcome(error=text, is_secondary=is_secondary, summary=self.summary, note=self.note)
        )
        outcomes = [
            msgspec.msgpack.decode(data, type=_RankOutcome) for data in all_gather_bytes(own_outcome, mesh=self._mesh)
        ]
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        causes = [rank for rank in failed if not outcomes[rank].is_secondary]
        if error is not None and (not is_secondary or not causes):
            return
        if failed:
            rank = (causes or failed)[0]
            raise CheckpointError(
                expected=f"every rank to {self._doing}",
                found=f"rank {rank} failed: {outcomes[rank].error}",
                fix=f"fix the cause on rank {rank}",
            ) from None
        for rank, outcome in enumerate(outcomes):
            if outcome.summary != outcomes[0].summary:
                raise CheckpointError(
                    expected=f"every rank to {self._doing} consistently",
                    found=f"rank 0: {outcomes[0].summary}; rank {rank}: {outcome.summary}",
                    fix=self._fix,
                )
        self.notes = [outcome.note for outcome in outcomes]
