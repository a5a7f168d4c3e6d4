"""The other hosts of a run, as a host's supervisor sees them.

`rendezvous.peers` has the two classes of runs on several hosts: the followers that host 0 leads, and host 0 as a
follower sees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankless.launch.worker_output import Source
from rankless.records.events import AnyRecord

if TYPE_CHECKING:  # few runs continue without lost workers
    from rankless.records.elastic_driver_protocol import DriverMessage, WorkerMessage

StopMode = Literal["stop", "terminate", "interrupt", "lost", "kill"]
"""Why workers end: the job failed, SIGTERM or Ctrl-C to an agent, a host was lost, or the grace period is over."""


@dataclass(frozen=True)
class PeerPollResult:
    """What the other hosts have sent since the last poll."""

    records: Sequence[AnyRecord] = ()
    stop: StopMode | None = None
    """Host 0's request to end the workers."""


class Peers:
    """The other hosts of a run. This class is for a run on one host: nothing arrives, and nothing is sent."""

    attributes_failures = True
    """Whether this host decides which rank caused a failure."""
    lost_reason: str | None = None
    """How host 0 was lost, if this is another host and it was lost."""
    job_end: tuple[int, str] | None = None
    """The exit code of the job and host 0's text for this host, once host 0 has sent them."""

    def fileno(self) -> int | None:
        """Return the descriptor for a selector, or None if there is none."""
        return None

    def host_of(self, rank: int) -> int:  # noqa: ARG002  # a run on one host has host 0 alone
        """Return the index of the host on which a rank runs."""
        return 0

    def poll(self, now: float) -> PeerPollResult:  # noqa: ARG002  # likewise
        """Return what has arrived since the last call."""
        return PeerPollResult()

    def send_records(self, records: Sequence[AnyRecord]) -> None:
        """Send host 0 what has happened on this host. Host 0 has its own records."""

    def stop_workers(self, mode: StopMode) -> None:
        """Request the other hosts to end their workers. Only host 0 does."""

    def request_rank_status(self) -> None:
        """Request a `RankStatus` record of every rank of the other hosts. Only host 0 does."""

    def take_rank_status_request(self) -> bool:
        """Return whether host 0 has requested the status of this host's ranks since the last call."""
        return False

    def send_interrupt(self, number: int) -> None:
        """Report to host 0 that this host's agent has received a signal."""

    def send_end(self, *, fork_server_exit_code: int, interrupted_by: int | None) -> None:
        """Report to host 0 that no process of the job is alive on this host."""

    def send_job_end(self, exit_code: int, texts: Sequence[str]) -> None:
        """Send each host the job's exit code and its own text, by host index. Only host 0 does."""

    @property
    def are_running(self) -> bool:
        """Whether a process of the job is alive on another host."""
        return False

    def send_output(self, source: Source, data: bytes) -> None:
        """Send a worker's output to host 0, which shows it."""

    def set_output_sink(self, show: Callable[[Source, bytes], None]) -> None:
        """Pass the output of other hosts' workers to `show` from now on. Only host 0 does."""

    @property
    def has_unsent_data(self) -> bool:
        """Whether host 0 has not taken everything that was sent."""
        return False

    def send_to_worker(self, rank: int, message: "DriverMessage") -> None:
        """Send a message to a worker of another host."""

    def kill_worker(self, rank: int) -> None:
        """Request the agent of another host to kill a worker. Only host 0 does."""

    def take_worker_messages(self) -> "list[tuple[int, WorkerMessage]]":
        """Return what workers of other hosts have sent since the last call, each with the worker's rank."""
        return []
