"""All threads of a rank raise the cause of a group's end, also one that fails while another one asks for the cause."""

import threading

from rankless.collectives.backends.group_failure_errors import Membership
from rankless.collectives.backends.hosts.host_waits import FirstFailure, HostWaits
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.errors import CollectiveError

CAUSE = CollectiveError(expected="all ranks", found="rank 1 aborted the group", fix="see rank 1")
LOST = CollectiveError(expected="all ranks", found="the connection to rank 0 is lost (closed)", fix="see rank 0")


class SlowStore(FirstFailure):
    """Knows the cause once `answer` is set."""

    def __init__(self) -> None:
        self.is_asked, self.answer = threading.Event(), threading.Event()

    def report(self, _error: CollectiveError, *, wait_seconds: float) -> CollectiveError:  # noqa: ARG002
        self.is_asked.set()
        assert self.answer.wait(30)
        return CAUSE


def test_a_thread_that_fails_meanwhile_raises_the_cause_too():
    store, found = SlowStore(), dict[str, str]()
    member = Membership(rank=2, global_ranks=(0, 1, 2), timeout_seconds=30.0)
    layout = RanksOfHosts(rank=2, hosts=((0, 1), (2,)))
    waits = HostWaits(member, layout, local=None, exchanges=(), failure=store)

    def fail(name: str) -> None:
        try:
            waits.fail(LOST)
        except CollectiveError as error:
            found[name] = str(error.found)

    threads = [threading.Thread(target=fail, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    assert store.is_asked.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # it waits: without the lock it has raised its own error by now
    assert found == {}
    store.answer.set()
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(("first", "second"), CAUSE.found)
