"""A host other than host 0 before the start: it connects to host 0 and waits until the job starts."""

import contextlib
import functools
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankless.config.run_config import Cluster
from rankless.errors import JoinError
from rankless.launch.rendezvous.control_connection import (
    ConnectionBrokenError,
    LeaderConnection,
    LeaderUnreachableError,
    TokenRejectedError,
    connect_to_leader,
)
from rankless.launch.rendezvous.host_consistency import HostFacts
from rankless.launch.rendezvous.job_token import TOKEN_FOLDER, TokenSource
from rankless.launch.rendezvous.messages import (
    ControlMessage,
    JobStarted,
    JoinProgress,
    JoinRefused,
    JoinRequest,
)
from rankless.launch.rendezvous.port_test import PortTester
from rankless.launch.rendezvous.wait_for_hosts import PROGRESS_SECONDS
from rankless.launch.signal_reader import Interrupts, RendezvousInterrupted

Answer = Callable[[str, ControlMessage], ControlMessage | None]

CONNECT_TIMEOUT_SECONDS = 2.0
RETRY_SECONDS = 0.1
_NO_TOKEN = {
    "script": "it has not delivered the job's token here by ssh yet",
    "slurm": f"its token is not in ~/{TOKEN_FOLDER} here yet (RANKLESS_TOKEN_FILE names one elsewhere)",
}
POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class JoinedJob:
    """A job that this host has joined."""

    leader: LeaderConnection
    started: JobStarted
    token: bytes
    """The job's token."""


def join_leader(
    cluster: Cluster,
    collect_facts: Callable[[], HostFacts],
    token_source: TokenSource,
    *,
    interrupts: Interrupts,
    notify: Callable[[str], None],
    answer: Answer = lambda _address, _message: None,
) -> JoinedJob:
    """Connect to host 0 and wait until it starts the job.

    `answer` gets this host's address on its route to host 0 and each message, and returns what to send host 0.

    Raises `JoinError` if host 0 cannot be reached before the timeout, or refuses this host. Raises
    `RendezvousInterrupted` on a signal.
    """
    start = last_progress_at = time.monotonic()
    reason = "no attempt yet"
    while (waited := time.monotonic() - start) < cluster.join_timeout_seconds:
        try:
            token = token_source.read()
            if token is None:
                raise LeaderUnreachableError(_NO_TOKEN[cluster.agent_start])
            leader, started = _join(cluster, token, collect_facts, answer, interrupts=interrupts, notify=notify)
            token_source.discard()
            return JoinedJob(leader=leader, started=started, token=token)
        except LeaderUnreachableError as error:
            reason = str(error)
        except TokenRejectedError as error:
            reason = "it has a different token"
            if not token_source.discard_rejected():
                raise _make_start_error(cluster, error) from None
        if time.monotonic() - last_progress_at > PROGRESS_SECONDS:
            last_progress_at = time.monotonic()
            notify(f"waiting for host 0, {cluster.hosts[0]}: {reason}, {waited:.0f} s")
        _wait_or_interrupt(interrupts, RETRY_SECONDS)
    raise JoinError(
        expected=f"host 0 at {cluster.hosts[0]}:{cluster.port} in {cluster.join_timeout_seconds:g} s (--join-timeout)",
        found=reason,
        fix=f"start the same command line on {cluster.hosts[0]}, with the same --port; rankless doctor finds more",
    )


def _join(
    cluster: Cluster,
    token: bytes,
    collect_facts: Callable[[], HostFacts],
    answer: Answer,
    *,
    interrupts: Interrupts,
    notify: Callable[[str], None],
) -> tuple[LeaderConnection, JobStarted]:
    """Try once to join the job of host 0. Raises `LeaderUnreachableError` and `TokenRejectedError` besides."""
    connection = connect_to_leader(
        cluster.hosts[0].address, cluster.port, token=token, timeout_seconds=CONNECT_TIMEOUT_SECONDS
    )
    facts = collect_facts()
    connection.send(JoinRequest(host=cluster.host_index, facts=facts))
    with contextlib.closing(PortTester(facts.address)) as tester:
        return _wait_for_start(
            LeaderConnection(connection),
            cluster,
            tester,
            functools.partial(answer, facts.address),
            interrupts=interrupts,
            notify=notify,
        )


def _wait_for_start(
    leader: LeaderConnection,
    cluster: Cluster,
    tester: PortTester,
    answer: Callable[[ControlMessage], ControlMessage | None],
    *,
    interrupts: Interrupts,
    notify: Callable[[str], None],
) -> tuple[LeaderConnection, JobStarted]:
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(leader, selectors.EVENT_READ)
            selector.register(interrupts, selectors.EVENT_READ)
            while True:
                selector.select(POLL_SECONDS)
                _wait_or_interrupt(interrupts, 0)
                if (result := tester.take_result()) is not None:
                    leader.send(result)
                for message in leader.poll(time.monotonic()):
                    if isinstance(message, JobStarted):
                        return leader, message
                    if isinstance(message, JoinRefused):
                        raise JoinError(expected=message.expected, found=message.found, fix=message.fix)
                    if isinstance(message, JoinProgress):
                        notify(message.text)
                    for sent in (tester.receive(message), answer(message)):
                        if sent is not None:
                            leader.send(sent)
    except TokenRejectedError:
        leader.close()
        raise
    except ConnectionBrokenError as error:
        leader.close()
        raise _make_start_error(cluster, error) from None
    except BaseException:
        leader.close()
        raise


def _make_start_error(cluster: Cluster, error: ConnectionBrokenError) -> JoinError:
    return JoinError(
        expected=f"host 0, {cluster.hosts[0]}, to start the job",
        found=str(error),
        fix="look at its terminal; all hosts need the same token (RANKLESS_TOKEN_FILE), or none (--insecure)",
    )


def _wait_or_interrupt(interrupts: Interrupts, seconds: float) -> None:
    """Wait for some seconds. Raises `RendezvousInterrupted` as soon as a signal arrives."""
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        selector.select(seconds)
    if numbers := interrupts.read():
        raise RendezvousInterrupted(numbers[0])
