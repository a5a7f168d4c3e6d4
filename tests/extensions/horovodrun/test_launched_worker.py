"""What Horovod's own launcher tells its workers, and what of it cannot be meant."""

import pytest

from rankless.config import environment
from rankless.errors import JoinError
from rankless.extensions.horovodrun.launched_worker import HorovodWorker, read_worker
from rankless.records.elastic_driver_protocol import RankAssignment

VARIABLES = {
    "GLOO_RENDEZVOUS_ADDR": "10.1.2.3",
    "GLOO_RENDEZVOUS_PORT": "4001",
    "RANK": "3",
    "SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "HOSTNAME": "b",
    "CONTROLLER": "gloo",
    "GLOO_IFACE": "eth0",
}


def horovod_worker(variables: dict[str, str]) -> HorovodWorker:
    return read_worker({"PATH": "/bin", **{f"HOROVOD_{name}": value for name, value in variables.items()}})


def test_a_worker_of_horovodrun():
    assert horovod_worker(VARIABLES) == HorovodWorker(
        rank=3,
        world_size=4,
        address="10.1.2.3",
        port=4001,
        assignment=RankAssignment(rank=3, size=4, local_rank=1, local_size=2, cross_rank=1, cross_size=2),
        interface="eth0",
        timeout_seconds=600.0,
    )
    assert horovod_worker({**VARIABLES, "ELASTIC": "0", "START_TIMEOUT": "7"}).timeout_seconds == 7


def test_a_launcher_that_sets_fewer_variables():
    least = {name: VARIABLES[name] for name in ("GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "RANK", "SIZE")}
    found = horovod_worker(least)
    assert (found.assignment, found.interface) == (None, None)


@pytest.mark.parametrize("address", [None, ""])
def test_without_a_server_no_launcher_has_started_this_process(address: str | None, monkeypatch: pytest.MonkeyPatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    assert environment.is_launched()
    found = environment.read_launched_worker()
    assert found is not None
    assert (found.rank, found.world_size) == (3, 4)
    if address is None:
        monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    else:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    assert environment.read_launched_worker() is None
    assert not environment.is_launched()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "first", "a number"),
        ("RANK", "-1", "a number"),
        ("RANK", "4", "a rank below HOROVOD_SIZE=4"),
        ("SIZE", "", "a number"),
        ("SIZE", "٤", "a number"),
        ("LOCAL_RANK", "one", "a number"),
        ("GLOO_RENDEZVOUS_PORT", "http", "a number"),
        ("GLOO_RENDEZVOUS_PORT", "0", "a port from 1 to 65535"),
        ("GLOO_RENDEZVOUS_PORT", "65536", "a port from 1 to 65535"),
    ],
)
def test_the_error_names_an_invalid_variable(name: str, value: str, expected: str):
    with pytest.raises(JoinError) as caught:
        horovod_worker({**VARIABLES, name: value})
    assert caught.value.expected.startswith(f"in HOROVOD_{name} {expected}")
    assert caught.value.found == repr(value)
    assert "unset HOROVOD_GLOO_RENDEZVOUS_ADDR" in caught.value.fix


def test_the_error_for_a_missing_variable_says_so():
    with pytest.raises(JoinError) as caught:
        horovod_worker({name: value for name, value in VARIABLES.items() if name != "RANK"})
    assert (caught.value.expected, caught.value.found) == (
        "in HOROVOD_RANK a number, as horovodrun sets it",
        "nothing",
    )


def test_an_elastic_job_of_another_launcher_is_rejected():
    with pytest.raises(JoinError) as caught:
        horovod_worker({**VARIABLES, "ELASTIC": "1"})
    assert "HOROVOD_ELASTIC=1" in caught.value.found
    assert "rankless horovodrun --min-np" in caught.value.fix
