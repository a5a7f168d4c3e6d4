"""Hosts from a list, a file and code; which of them this one is."""

import socket
from pathlib import Path

import pytest

from rankless.config.hosts_and_addresses import (
    Host,
    addresses_of,
    interface_towards,
    own_addresses,
    own_host_index,
    parse_host_settings,
    parse_hosts,
    read_hostfile,
)
from rankless.errors import ConfigError

LISTED = {
    "a:4,b:2": [("a", 4), ("b", 2)],
    "a, b": [("a", 1), ("b", 1)],
    "10.0.0.1:8": [("10.0.0.1", 8)],
    "[fe80::1]:2,[::2]": [("fe80::1", 2), ("::2", 1)],
}


@pytest.mark.parametrize("text", LISTED)
def test_a_list_of_hosts_is_read(text: str):
    found = parse_hosts(text, workers_per_host=None)
    assert [(host.address, host.workers) for host in found] == LISTED[text]


def test_a_users_name_is_for_ssh():
    (host,) = parse_hosts("me@a:3", workers_per_host=None)
    assert host == Host(address="a", workers=3, user="me")


def test_n_is_the_number_of_workers_of_hosts_without_one():
    assert [host.workers for host in parse_hosts("a,b", workers_per_host=4)] == [4, 4]
    assert [host.workers for host in parse_hosts("a:4,b", workers_per_host=4)] == [4, 4]
    with pytest.raises(ConfigError, match="one number of workers"):
        parse_hosts("a:2,b", workers_per_host=4)


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:-1", "a:x", "a:1:2", ":4", "a,a", "a:2,b,a:3"])
def test_invalid_lists_are_rejected(text: str):
    with pytest.raises(ConfigError) as raised:
        parse_hosts(text, workers_per_host=None)
    assert raised.value.fix


def test_the_error_for_a_repeated_host_gives_the_sum_of_its_workers():
    with pytest.raises(ConfigError, match="a:5"):
        parse_hosts("a:2,b,a:3", workers_per_host=None)


def test_a_file_of_hosts_is_read(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# two\n10.0.0.1 slots=4\n\nme@b slots=2 max_slots=8 # the other\nc:3\n")
    assert read_hostfile(str(file), workers_per_host=None) == (
        Host(address="10.0.0.1", workers=4),
        Host(address="b", workers=2, user="me"),
        Host(address="c", workers=3),
    )
    file.write_text("a slot=4\n")
    with pytest.raises(ConfigError, match="slots=4"):
        read_hostfile(str(file), workers_per_host=None)
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="none"):
        read_hostfile(str(file), workers_per_host=None)
    with pytest.raises(ConfigError, match="--hostfile"):
        read_hostfile(str(tmp_path / "nowhere"), workers_per_host=None)


def test_hosts_of_a_script_are_names_or_oneflows_dicts():
    found = parse_host_settings(["10.7.0.1", {"addr": "10.7.0.2"}], workers_per_host=2)
    assert found == (Host(address="10.7.0.1", workers=2), Host(address="10.7.0.2", workers=2))
    for wrong in ([3], [{"address": "a"}], [""], [{"addr": 5}], []):
        with pytest.raises(ConfigError):
            parse_host_settings(wrong, workers_per_host=2)


def test_a_host_finds_itself_by_its_own_addresses():
    assert own_host_index([Host(address="192.0.2.77", workers=1), Host(address="127.0.0.1", workers=1)]) == 1
    with pytest.raises(ConfigError, match="which are both this one"):
        own_host_index([Host(address="127.0.0.1", workers=1), Host(address="localhost", workers=1)])
    with pytest.raises(ConfigError) as raised:
        own_host_index([Host(address="192.0.2.77", workers=1), Host(address="no-such-name.invalid", workers=1)])
    assert socket.gethostname() in str(raised.value.found)


def test_names_and_routes_are_looked_up():
    assert "127.0.0.1" in addresses_of("127.0.0.1") & own_addresses()
    assert addresses_of("no-such-name.invalid") == frozenset()
    assert interface_towards("127.0.0.1") == ("lo", "127.0.0.1")
