"""The host discovery script of an elastic job: what it may be, and what is said of one that does not answer."""

from pathlib import Path

import pytest
from support.jobs import wait_until

from rankless.launch.elastic import discovery
from rankless.launch.elastic.discovery import DiscoveredHosts


def script(folder: Path, text: str) -> str:
    path = folder / "discover.sh"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def slots(hosts: DiscoveredHosts) -> dict[str, int] | None:
    """What it says in the end."""
    clock = iter(range(1000))
    wait_until(lambda: hosts.turn(float(next(clock))) is not None, seconds=20)
    found = hosts.turn(1000.0)
    return None if found is None else dict(found)


def test_a_script_without_a_first_line_is_the_shells(tmp_path: Path):
    hosts = DiscoveredHosts(script(tmp_path, "echo a:2\necho b\n"), slots_per_host=3)
    try:
        assert slots(hosts) == {"a": 2, "b": 3}
    finally:
        hosts.close()


@pytest.mark.slow
def test_a_script_that_does_not_answer_is_spoken_of_ended_and_asked_anew(tmp_path: Path):
    hangs = f"#!/bin/sh\n[ -e {tmp_path}/asked ] && echo a && exit\ntouch {tmp_path}/asked\nsleep 600\n"
    hosts = DiscoveredHosts(script(tmp_path, hangs), slots_per_host=None)
    try:
        hosts.turn(0.0)
        wait_until((tmp_path / "asked").exists)
        assert hosts.trouble() is None
        hosts.turn(discovery.SLOW_SECONDS + 1)
        assert "discover.sh has not answered for 10 s" in str(hosts.trouble())
        wait_until(lambda: hosts.turn(discovery.LONGEST_SECONDS + 2) == {"a": 1}, seconds=20)
        assert hosts.trouble() is None
    finally:
        hosts.close()
