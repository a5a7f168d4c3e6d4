"""Another host than host 0, until the job starts: finding host 0, and waiting for its word."""

import selectors
import time
from collections.abc import Callable

from rankless.config.run_config import Cluster
from rankless.errors import JoinError
from rankless.launch.rendezvous.control_client import (
    LeaderConnection,
    LeaderUnreachableError,
    TokenRejectedError,
    connect,
)
from rankless.launch.rendezvous.control_connection import ConnectionBrokenError
from rankless.launch.rendezvous.host_facts import HostFacts
from rankless.launch.rendezvous.job_token import TokenSource
from rankless.launch.rendezvous.leader import TELL_EVERY_SECONDS, RendezvousInterrupted
from rankless.launch.rendezvous.messages import JobStarted, JoinProgress, JoinRefused, JoinRequest
from rankless.launch.signals import Interrupts

TRY_SECONDS = 2.0
NAP_SECONDS = 0.1


def join_leader(
    cluster: Cluster,
    facts: Callable[[], HostFacts],
    tokens: TokenSource,
    *,
    interrupts: Interrupts,
    tell: Callable[[str], None],
) -> tuple[LeaderConnection, JobStarted]:
    """The connection to host 0, and its word to start, once all hosts are there and agree.

    Raises JoinError if host 0 is not reached in time, or refuses; Interrupted on a signal.
    """
    start = told = time.monotonic()
    why = "not tried yet"
    while (waited := time.monotonic() - start) < cluster.join_timeout_seconds:
        try:
            token = tokens.current()
            if token is None:
                raise LeaderUnreachableError("it has not brought the job's token here by ssh yet")
            session = connect(cluster.hosts[0].address, cluster.port, token=token, timeout_seconds=TRY_SECONDS)
            session.send(JoinRequest(host=cluster.host_index, facts=facts()))
            found = _await_start(LeaderConnection(session), cluster, interrupts=interrupts, tell=tell)
            tokens.used()
            return found
        except LeaderUnreachableError as error:
            why = str(error)
        except TokenRejectedError as error:
            why = "it has another token"
            if not tokens.refused():
                raise _not_started(cluster, error) from None
        if time.monotonic() - told > TELL_EVERY_SECONDS:
            told = time.monotonic()
            tell(f"waiting for host 0, {cluster.hosts[0]}: {why}, {waited:.0f} s")
        _heed(interrupts, NAP_SECONDS)
    raise JoinError(
        expected=f"host 0 at {cluster.hosts[0]}:{cluster.port} in {cluster.join_timeout_seconds:g} s (--join-timeout)",
        found=why,
        fix=f"start the same line on {cluster.hosts[0]}, with the same --port; rankless doctor looks further",
    )


def _await_start(
    uplink: LeaderConnection, cluster: Cluster, *, interrupts: Interrupts, tell: Callable[[str], None]
) -> tuple[LeaderConnection, JobStarted]:
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(uplink, selectors.EVENT_READ)
            selector.register(interrupts, selectors.EVENT_READ)
            while True:
                selector.select(0.2)
                _heed(interrupts, 0)
                for frame in uplink.turn(time.monotonic()):
                    if isinstance(frame, JobStarted):
                        return uplink, frame
                    if isinstance(frame, JoinRefused):
                        raise JoinError(expected=frame.expected, found=frame.found, fix=frame.fix)
                    if isinstance(frame, JoinProgress):
                        tell(frame.text)
    except TokenRejectedError:
        uplink.close()
        raise
    except ConnectionBrokenError as broken:
        uplink.close()
        raise _not_started(cluster, broken) from None
    except BaseException:
        uplink.close()
        raise


def _not_started(cluster: Cluster, broken: ConnectionBrokenError) -> JoinError:
    return JoinError(
        expected=f"host 0, {cluster.hosts[0]}, to start the job",
        found=str(broken),
        fix="look at its terminal; all hosts need the same token (RANKLESS_TOKEN_FILE), or none (--insecure)",
    )


def _heed(interrupts: Interrupts, seconds: float) -> None:
    """Wait for a signal. Raises Interrupted if one has come."""
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        selector.select(seconds)
    if numbers := interrupts.read():
        raise RendezvousInterrupted(numbers[0])
