"""The host discovery script of an elastic job: which scripts run, and the warning if one does not answer."""

from pathlib import Path

import pytest
from support.jobs import wait_until

from rankless.extensions.horovodrun.elastic import discovery
from rankless.extensions.horovodrun.elastic.discovery import DiscoveredHosts


def write_script(folder: Path, text: str) -> str:
    path = folder / "discover.sh"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def wait_for_slots(hosts: DiscoveredHosts) -> dict[str, int] | None:
    """Return the first slots that the script prints."""
    clock = iter(range(1000))
    wait_until(lambda: hosts.poll(float(next(clock))) is not None, seconds=20)
    found = hosts.poll(1000.0)
    return None if found is None else dict(found)


def test_the_shell_runs_a_script_without_an_interpreter_line(tmp_path: Path):
    hosts = DiscoveredHosts(write_script(tmp_path, "echo a:2\necho b\n"), slots_per_host=3)
    try:
        assert wait_for_slots(hosts) == {"a": 2, "b": 3}
    finally:
        hosts.close()


@pytest.mark.slow
def test_a_script_that_does_not_answer_gives_a_warning_and_is_restarted(tmp_path: Path):
    hangs = f"#!/bin/sh\n[ -e {tmp_path}/asked ] && echo a && exit\ntouch {tmp_path}/asked\nsleep 600\n"
    hosts = DiscoveredHosts(write_script(tmp_path, hangs), slots_per_host=None)
    try:
        hosts.poll(0.0)
        wait_until((tmp_path / "asked").exists)
        assert hosts.warning is None
        hosts.poll(discovery.SLOW_SECONDS + 1)
        assert "discover.sh has not answered for 10 s" in str(hosts.warning)
        wait_until(lambda: hosts.poll(discovery.DISCOVERY_TIMEOUT_SECONDS + 2) == {"a": 1}, seconds=20)
        assert hosts.warning is None
    finally:
        hosts.close()
