"""How long a rank waits for its host and for other hosts, and what ends its waits.

Note [times of a collective]: a rank that is late ends the group, and the ranks of its own host know its name. Ranks
that wait for it through others wait longer: the first ranks of other hosts by one grace, and the other ranks there by
two. So a rank that knows the name reports it first, unless the ranks have begun to wait at very different times.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rankless.collectives.backends.group_failure_errors import FOUND, Membership, make_error, make_forked_error
from rankless.collectives.backends.hosts.gloo_exchange import ExchangeTimeout, GlooExchange
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.shared_group import SharedGroup
from rankless.errors import CollectiveError
from rankless.records.group_failure_codes import FailureKind, encode_failure

_LONGEST_GRACE_SECONDS = 5.0
_LOST = "is lost ("
_WITHOUT_DETAILS = [FOUND[kind].partition("} ")[2] for kind in (FailureKind.OTHER_HOST, FailureKind.MISMATCH)]
"""What a rank finds if another one of its host has the error."""


_KEY = "first failure"
_STORE_SECONDS = 2.0
"""How long a rank waits for the store. Its server may be gone, or unreachable."""
WITNESS_SECONDS = 0.3
"""How long a rank that has only lost a connection waits for one that knows why."""
_POLL_SECONDS = 0.02


class FirstFailure:
    """What ended a group.

    Args:
        store: A store with keys of its own for this group.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def report(self, error: CollectiveError, *, wait_seconds: float) -> CollectiveError:
        """Return the error that all ranks raise: the first that a rank has reported.

        Args:
            error: What this rank has found.
            wait_seconds: How long others that know more may report first.
        """
        found: list[str] = []
        thread = threading.Thread(
            target=self._exchange, args=(error, wait_seconds, found), name="rankless-failure", daemon=True
        )
        thread.start()
        thread.join(_STORE_SECONDS)
        first = json.loads(found[0]) if found else None
        if first is None or first["found"] == error.found:
            return error
        return CollectiveError(expected=first["expected"], found=first["found"], fix=first["fix"])

    def _exchange(self, error: CollectiveError, wait_seconds: float, found: list[str]) -> None:
        try:
            deadline = time.monotonic() + wait_seconds
            while time.monotonic() < deadline and not self._store.check([_KEY]):
                time.sleep(_POLL_SECONDS)
            own = json.dumps({"expected": str(error.expected), "found": str(error.found), "fix": error.fix})
            found.append(bytes(self._store.compare_set(_KEY, "", own)).decode())
        except RuntimeError:
            return  # rank 0, which serves the store, is gone


class HostWaits:
    """The waits of one rank of a group on several hosts, and the end of the group.

    Args:
        member: This process's place in the group.
        layout: The hosts of the group.
        local: The shared memory of this rank's host; None for a rank that is alone on its host.
        exchanges: What connects this rank to those of other hosts.
        failure: Tells all ranks why the group ended.
    """

    def __init__(
        self,
        member: Membership,
        layout: RanksOfHosts,
        *,
        local: SharedGroup | None,
        exchanges: tuple[GlooExchange, ...],
        failure: FirstFailure,
    ) -> None:
        self.member, self._layout, self._local = member, layout, local
        self._exchanges, self._failure = exchanges, failure
        self._limit_seconds = member.timeout_seconds
        self._error: CollectiveError | None = None
        self._ending = threading.RLock()
        """Held until the first error is known. Another thread of this rank that fails meanwhile raises it, too."""
        self._is_closed = False
        self.watch: Callable[[], None] | None = None
        """Called now and then while a collective waits. It raises a `CollectiveError` if the wait is in vain."""
        self._process_id = os.getpid()

    def check(self) -> None:
        """Raise the `CollectiveError` that says why the group cannot be used, if it cannot."""
        if self._local is not None and not (self._is_closed or self._error):
            try:
                self._local.signals.check()
            except CollectiveError as error:
                self.fail(error)
        if self.is_forked:
            raise make_forked_error()
        if self._is_closed:
            raise make_error(encode_failure(FailureKind.CLOSED, self.member.rank), self.member)
        if self._error is not None:
            raise self._error.with_traceback(None)

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that the group's rank has forked."""
        return os.getpid() != self._process_id

    def close(self) -> None:
        """End the waits of this rank."""
        self._is_closed = True

    @contextmanager
    def limit_waits(self, seconds: float) -> Iterator[None]:
        """Within the context, collectives wait at most so long for other ranks, instead of the group's timeout."""
        usual = self._limit_seconds
        self._set_limit(seconds)
        try:
            yield
        finally:
            self._set_limit(usual)

    def _set_limit(self, seconds: float) -> None:
        self._limit_seconds = seconds
        for exchange in self._exchanges:
            exchange.limit_seconds = seconds

    @contextmanager
    def wait_for_host(self, graces: int = 0) -> Iterator[None]:
        """Within the context, waits in shared memory have the time of the call, and some graces.

        Without graces the hosts exchange afterwards, so they end too if the connection to another host is lost.
        """
        if self._local is None:
            yield
            return
        signals = self._local.signals
        signals.watch = self._look_at_hosts if graces == 0 and self._layout.is_leader else self.watch
        try:
            with signals.limit_waits(self._limit_seconds + graces * self._grace_seconds):
                yield
        finally:
            signals.watch = None

    def _look_at_hosts(self) -> None:
        self._require_connections()
        if self.watch is not None:
            self.watch()

    def _require_connections(self) -> None:
        """Raise a `CollectiveError` if the first rank of another host has closed its connection."""
        leaders = self._exchanges[-1]
        peer = leaders.find_closed()
        if peer is not None:
            raise self._make_lost_error(self._layout.leaders[peer], "it is closed")

    def wait_for_hosts(self, exchange: GlooExchange, work: Any, *, members_wait: bool) -> None:
        """Wait for an exchange with other hosts.

        Args:
            exchange: Where it takes place.
            work: What it has started.
            members_wait: Whether all ranks of this host wait for the result, so that none may have ended.

        Raises:
            CollectiveError: A rank is late, a connection is lost, or the group has failed.
        """

        def check() -> None:
            if members_wait and self._local is not None:
                self._local.signals.require_living_peers()
            else:
                self.check()
            if self.watch is not None:
                self.watch()

        try:
            exchange.wait(work, self._limit_seconds + self._grace_seconds, check)
        except ExchangeTimeout:
            raise self._make_late_error(exchange) from None
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            raise self._make_connection_error(exchange, error) from error

    def fail(self, error: CollectiveError) -> NoReturn:
        """End the group on all ranks, and raise the first error that a rank has reported."""
        if self.is_forked:
            raise error
        with self._ending:
            if self._error is None:
                if not self._is_closed:
                    if self._local is not None:
                        own = self._layout.members.index(self.member.rank)
                        self._local.signals.end_group(FailureKind.OTHER_HOST, own)
                    error = self._failure.report(error, wait_seconds=_find_patience(error))
                self._error = error
                for exchange in self._exchanges:
                    exchange.shut_down()
        raise self._error

    def abort(self, kind: FailureKind) -> None:
        """End the group on all ranks: their waits raise."""
        try:
            self.fail(make_error(encode_failure(kind, self.member.rank), self.member))
        except CollectiveError:
            return

    @property
    def _grace_seconds(self) -> float:
        return min(self._limit_seconds / 4, _LONGEST_GRACE_SECONDS)

    def _make_late_error(self, exchange: GlooExchange) -> CollectiveError:
        others = [rank for rank in self._layout.leaders if rank != self.member.rank]
        names = " or ".join(f"rank {self.member.global_ranks[rank]}" for rank in others)
        among_leaders = exchange.size == len(self._layout.hosts)
        who = f"the host of {names}" if among_leaders else "a rank"
        return CollectiveError(
            expected="every rank of the group to take part in its collectives",
            found=f"{who} did not take part within {self._limit_seconds:g} s",
            fix="see if a rank there is stopped, busy, or makes other calls; "
            f"a longer {self.member.timeout_name} waits; create a new group to continue",
        )

    def _make_connection_error(self, exchange: GlooExchange, error: RuntimeError) -> CollectiveError:
        message = str(error).partition("] ")[2] or str(error)
        peer = exchange.find_closed()
        ranks = self._layout.leaders if exchange.size == len(self._layout.hosts) else range(self._layout.size)
        return self._make_lost_error(None if peer is None else ranks[peer], message.partition(". ")[0])

    def _make_lost_error(self, peer: int | None, how: str) -> CollectiveError:
        whose = "a rank of another host" if peer is None else f"rank {self.member.global_ranks[peer]}"
        return CollectiveError(
            expected="every rank of the group to take part in its collectives",
            found=f"the connection to {whose} {_LOST}{how})",
            fix=f"see why {whose} ended, and if its host can be reached; create a new group to continue",
        )


def _find_patience(error: CollectiveError) -> float:
    """Return how long a rank waits for one that knows more than its own error says."""
    if any(text in str(error.found) for text in _WITHOUT_DETAILS):
        return 3 * WITNESS_SECONDS
    return WITNESS_SECONDS if _LOST in str(error.found) else 0.0
