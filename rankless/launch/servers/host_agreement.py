"""Before a run on several hosts starts, they agree on the addresses of its servers.

Each host says which of the given addresses are its own, with the facts of its `JoinRequest`. Host 0 then lets each
reserve those of its servers, and learns the ports that they have chosen. All this goes through the authenticated
connections between the agents. No secret does: see `derive_server_token`.
"""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rankless.config.hosts import Endpoint
from rankless.config.server_hosts import divide_servers, place_copies
from rankless.config.servers import AgreedServers, RequestedServers
from rankless.errors import JoinError, RanklessError
from rankless.launch.rendezvous.answers import ANSWER_TIMEOUT_SECONDS, announced_failures, receive_answers
from rankless.launch.rendezvous.control_server import ControlServer, HostReport
from rankless.launch.rendezvous.host_facts import HostFacts
from rankless.launch.rendezvous.messages import ControlMessage, ReserveServers, ServersRefused, ServersReserved
from rankless.launch.servers.addresses import reserve_address
from rankless.launch.signals import Interrupts

_SALT_BYTES = 32


class ServerReservation:
    """The addresses of this host's servers, which no other process gets within the context."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.close()

    def reserve(self, endpoints: Sequence[str], outward: str) -> tuple[str, ...]:
        """Reserve addresses, and return them as ZeroMQ's. Raises `ConfigError` for one that is not free."""
        return tuple(reserve_address(each, self._held, outward=outward) for each in endpoints)

    def answer(self, outward: str, message: ControlMessage) -> ServersReserved | ServersRefused | None:
        """Do what host 0 requests, and return what to send it. Ignore other messages.

        Args:
            outward: This host's address on its route to host 0.
            message: A message of host 0.
        """
        if not isinstance(message, ReserveServers):
            return None
        try:
            return ServersReserved(addresses=self.reserve(message.endpoints, outward))
        except RanklessError as error:
            return ServersRefused(expected=str(error.expected), found=str(error.found), fix=error.fix)


def agree_on_servers(
    server: ControlServer,
    requested: RequestedServers | None,
    reservation: ServerReservation,
    *,
    facts: Sequence[HostFacts],
    names: Sequence[str],
    interrupts: Interrupts,
) -> AgreedServers | None:
    """Return the servers of a run, whose addresses are reserved then; None for a run without servers.

    Args:
        server: The connections to the other hosts.
        requested: The servers that the user requests.
        reservation: Holds the addresses of this host, which is host 0.
        facts: What each host has said of itself, by host index.
        names: The name of each host.
        interrupts: The signals of this process.

    Raises:
        JoinError: An address is no host's or several hosts', is not free, or a host does not answer. The other hosts
            receive it too.
        ConfigError: The same for an address of this host.
        RendezvousInterrupted: On a signal.
    """
    if requested is None:
        return None
    with announced_failures(server):
        hosts = _find_hosts(requested, facts, names)
        wanted = {host: _list_endpoints(requested, hosts, host, facts[host].address) for host in sorted(set(hosts))}
        for host in wanted.keys() - {0}:
            server.send(host, ReserveServers(endpoints=wanted[host]))
        addresses = {0: reservation.reserve(wanted.get(0, ()), facts[0].address)}
        answers = receive_answers(
            server, (ServersReserved, ServersRefused), wanted.keys() - {0}, names=names, interrupts=interrupts
        )
        for host in sorted(wanted.keys() - {0}):
            addresses[host] = _read_answer(answers, host, names)
        found = {host: iter(each) for host, each in addresses.items()}
        return AgreedServers(
            addresses=tuple(next(found[host]) for host in hosts), hosts=hosts, salt=secrets.token_hex(_SALT_BYTES)
        )


def _find_hosts(requested: RequestedServers, facts: Sequence[HostFacts], names: Sequence[str]) -> tuple[int, ...]:
    """Return the index of each server's host."""
    hosts = _find_first_hosts(requested, facts, names)
    if not requested.replicas:
        return hosts
    candidates = sorted(set(hosts)) if requested.endpoints else range(len(facts))
    if len(candidates) == 1:
        raise JoinError(
            expected="addresses of two hosts or more in --servers with --replicas 1, which puts copies on another host",
            found=f"{', '.join(requested.endpoints)}, all on {names[hosts[0]]}",
            fix="add a server on another host, or omit --replicas",
        )
    return (*hosts, *place_copies(hosts, candidates))


def _find_first_hosts(requested: RequestedServers, facts: Sequence[HostFacts], names: Sequence[str]) -> tuple[int, ...]:
    """Return the index of the host of each server without copies."""
    if not requested.endpoints:
        return divide_servers(requested.count, len(facts))
    found = [
        [host for host, each in enumerate(facts) if server in each.own_servers] for server in range(requested.count)
    ]
    for endpoint, hosts in zip(requested.endpoints, found, strict=True):
        if len(hosts) != 1:
            shared = " and ".join(names[host] for host in hosts)
            raise JoinError(
                expected="each address of --servers to be that of one host of the run",
                found=f"{endpoint}, which is an address of " + (shared or f"none of {', '.join(names)}"),
                fix="give a host one name in --servers and --workers"
                if hosts
                else "correct the address; --workers A,A with --servers C adds a host C that has servers alone",
            )
    return tuple(hosts[0] for hosts in found)


def _list_endpoints(requested: RequestedServers, hosts: Sequence[int], host: int, address: str) -> tuple[str, ...]:
    """Return the endpoints of a host's servers, in their order."""
    own = [server for server, each in enumerate(hosts) if each == host]
    given = len(requested.endpoints)  # copies have none
    return tuple(requested.endpoints[server] if server < given else str(Endpoint(address)) for server in own)


def _read_answer(answers: Mapping[int, HostReport], host: int, names: Sequence[str]) -> tuple[str, ...]:
    answer = answers.get(host)
    if isinstance(answer, ServersReserved):
        return answer.addresses
    if not isinstance(answer, ServersRefused):
        raise JoinError(
            expected=f"{names[host]} to reserve the addresses of its servers",
            found=f"no answer within {ANSWER_TIMEOUT_SECONDS:g} s",
            fix="look at that host: it may be overloaded",
        )
    raise JoinError(expected=answer.expected, found=f"on {names[host]}: {answer.found}", fix=answer.fix)
