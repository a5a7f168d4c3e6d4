"""Sources of the hosts of an elastic job. Tools derive theirs from `HostDiscovery`."""

import subprocess
from collections.abc import Mapping


class HostDiscovery:
    """Knows which hosts a job may use now. Subclasses define how."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots by host name."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Runs a command that prints a host in each line, as `name` or `name:slots`.

    Args:
        discovery_script: The command, for a shell.
        slots: The number of slots of hosts that are printed without one.
    """

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._discovery_script = discovery_script
        self._default_slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots by host name.

        Raises:
            RuntimeError: The command failed.
            ValueError: A line has no number of slots, and there is no default.
        """
        done = subprocess.run(self._discovery_script, shell=True, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Failed to execute discovery script: {self._discovery_script}. {done.stderr}".strip())
        found = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            host, _, slots = line.partition(":")
            if not slots and self._default_slots is None:
                raise ValueError(f"No slots for the host {host}: print `{host}:SLOTS`, or pass --slots-per-host.")
            found[host] = int(slots) if slots else int(self._default_slots or 0)
        return found


class FixedHosts(HostDiscovery):
    """Hosts that only the caller changes.

    Args:
        available_hosts: The number of slots by host name.
    """

    def __init__(self, available_hosts: Mapping[str, int]) -> None:
        self._available_hosts = dict(available_hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots by host name."""
        return dict(self._available_hosts)

    def set(self, available_hosts: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._available_hosts = dict(available_hosts)
