"""A stretch of work after which all ranks know whether all of them came through."""

from types import TracebackType

import msgspec

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.errors import CheckpointError
from rankless.parallel.mesh import Mesh


class OtherRankFailed(CheckpointError):
    """What a rank raises that came through itself, and learnt from the folder that another did not."""


class _RankOutcome(msgspec.Struct):
    """How one rank came through; `summary` must be the same on all that did. `follows`: its error is another's."""

    error: str | None
    is_secondary: bool
    summary: str
    note: bytes


class Agreement:
    """A context at whose end every rank raises if any rank raised, or if their `summary` differs.

    Without it a rank that raises would leave the others waiting in their next collective. The rank that raised keeps
    its own error, unless that only follows another's; the others get a CheckpointError that names it. `fix` is for
    ranks that differ. What each rank puts into `note`, all find in `notes` afterwards, in the order of ranks.
    """

    def __init__(self, *, mesh: Mesh, doing: str, fix: str = "let every rank come here alike") -> None:
        self._mesh = mesh
        self._doing = doing
        self._fix = fix
        self.summary = ""
        self.note = b""
        self.notes: list[bytes] = []

    def __enter__(self) -> "Agreement":
        self._mesh.check_sync_point(f"rankless.save or load: to {self._doing}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._mesh.size == 1:
            self.notes = [self.note]
            return
        text = None if error is None else f"{type(error).__name__}: {str(error).strip()}"
        is_secondary = isinstance(error, OtherRankFailed)
        mine = msgspec.msgpack.encode(
            _RankOutcome(error=text, is_secondary=is_secondary, summary=self.summary, note=self.note)
        )
        outcomes = [msgspec.msgpack.decode(data, type=_RankOutcome) for data in all_gather_bytes(mine, mesh=self._mesh)]
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        causes = [rank for rank in failed if not outcomes[rank].is_secondary]
        if error is not None and (not is_secondary or not causes):
            return
        if failed:
            rank = (causes or failed)[0]
            raise CheckpointError(
                expected=f"every rank to {self._doing}",
                found=f"rank {rank} failed: {outcomes[rank].error}",
                fix=f"mend the cause on rank {rank}",
            ) from None
        for rank, outcome in enumerate(outcomes):
            if outcome.summary != outcomes[0].summary:
                raise CheckpointError(
                    expected=f"every rank to {self._doing} alike",
                    found=f"rank 0: {outcomes[0].summary}; rank {rank}: {outcome.summary}",
                    fix=self._fix,
                )
        self.notes = [outcome.note for outcome in outcomes]
