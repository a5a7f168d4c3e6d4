import contextlib
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankless.errors import JoinError
from rankless.runtime.rendezvous.connect_to_run_store import open_run_store

ADDRESS, TOKEN = "127.0.0.1", "a token that others do not know"
SERVER = """
import socket, sys
from rankless.launch.authenticated_tcp_store import StoreServer
listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listening.getsockname()[1], flush=True)
with StoreServer([listening], token=sys.argv[1]) as server:
    for line in sys.stdin:
        server.end_round(int(line))
assert "torch" not in sys.modules
"""
QUERIES = {
    "set": lambda store, key, text: store.set(key, text),
    "get": lambda store, key, _: store.get(key) if store.check([key]) else None,
    "add": lambda store, key, text: store.add("number " + key, len(text) - 2),
    "check": lambda store, key, _: store.check([key, "a"]),
    "compare_set": lambda store, key, text: store.compare_set(key, text, text + "x"),
    "delete_key": lambda store, key, _: store.delete_key(key),
    "num_keys": lambda store, _key, _text: store.num_keys(),
    "append": lambda store, key, text: store.append(key, text),
    "multi_set": lambda store, key, text: store.multi_set([key, "a"], [text, ""]),
    "multi_get": lambda store, _key, _: store.multi_get(["a", "b"]) if store.check(["a", "b"]) else None,
    "queue_push": lambda store, key, text: store.queue_push("queue " + key, text),
    "queue_pop": lambda store, key, _: store.queue_pop("queue " + key) if store.check(["queue " + key]) else None,
    "queue_len": lambda store, key, _: store.queue_len("queue " + key),
    "wait": lambda store, key, _: store.wait([key], timedelta(seconds=5)) if store.check([key]) else None,
    "list_keys": lambda store, _key, _: sorted(store.list_keys()),
    "barrier": lambda store, key, _: store.barrier("barrier " + key, 1),
}


class Served:
    """A store that a process of its own serves, as an agent does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._commands = process.stdin
        self.port = int(process.stdout.readline())

    def open(self, token: str = TOKEN, round: int = 0) -> Any:
        return open_run_store(ADDRESS, self.port, token, round=round)

    def open_without_token(self) -> Any:
        return dist.TCPStore(ADDRESS, self.port, timeout=timedelta(seconds=5), wait_for_workers=False)

    def end_round(self, number: int) -> None:
        print(number, file=self._commands, flush=True)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    command = [sys.executable, "-c", SERVER, TOKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Served(process)
        process.stdin.close()
    assert process.returncode == 0


def answer(store: Any, query: str, key: str, text: str) -> Any:
    try:
        return QUERIES[query](store, key, text)
    except (dist.DistError, RuntimeError) as error:
        return type(error)


def test_every_query_has_the_answer_of_torchs_own_store(served):
    other = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    store = served.open(round=10)
    draws = random.Random(0)
    known = [name for name in QUERIES if hasattr(other, name)]  # older versions of PyTorch lack some
    for _ in range(3000):
        query, key, text = draws.choice(known), draws.choice("abcd"), draws.choice(["", "1", "text", "y" * 100_000])
        # Each has keys of the client's handshake.
        assert answer(store, query, key, text) == answer(dist.PrefixStore("p", other), query, key, text), query


def use(store: Any, query: str) -> None:
    if query in QUERIES:
        QUERIES[query](store, "key", "")
    else:
        store.compare_set(query, "", "{}")
    store.get("key")


def test_a_client_without_the_token_can_neither_read_nor_change_anything(served):
    served.open().set("key", "value")
    for query in [*QUERIES, "rankless/proof"]:
        with pytest.raises(dist.DistError):
            use(served.open_without_token(), query)
    with pytest.raises(JoinError, match="refuses this run's token"):
        served.open("another token")
    assert served.open().get("key") == b"value"


def test_what_a_client_has_sent_is_of_no_use_on_another_connection(served):
    store = served.open_without_token()
    challenge = store.get("rankless/challenge")
    assert challenge != served.open_without_token().get("rankless/challenge")
    assert len(challenge) == 64


def test_a_rank_that_waits_in_a_round_fails_when_the_round_ends(served):
    store, found = served.open(round=1), []

    def wait() -> None:
        try:
            store.get("never written")
        except dist.DistError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    other = served.open(round=2)
    served.end_round(1)
    thread.join(30)
    assert len(found) == 1
    with pytest.raises(dist.DistError, match="round 1 of this job has ended"):
        served.open(round=1)
    other.set("key", "2")
    assert other.get("key") == b"2"


def test_a_clone_of_a_store_is_served_too(served):
    store = served.open()
    store.set("cloned", "1")
    assert store.clone().get("cloned") == b"1"
    assert dist.PrefixStore("sub", store).clone().add("n", 2) == 2


def test_a_flood_of_idle_clients_takes_no_place_of_one_that_knows_the_token(served):
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection((ADDRESS, served.port)))
        assert served.open().add("while others wait", 1) == 1
