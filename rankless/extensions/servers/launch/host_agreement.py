"""Before a run on several hosts starts, they agree on the addresses of its servers.

Each host says which of the given addresses are its own, with the facts of its `JoinRequest`. Host 0 then lets each
reserve those of its servers, and learns the ports that they have chosen. All this goes through the authenticated
connections between the agents. No secret does: see `derive_role_token`.
"""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rankless.config.hosts_and_addresses import Endpoint
from rankless.config.run_config import AgreedProcesses
from rankless.errors import JoinError, RanklessError
from rankless.extensions.servers.config import SERVER_ROLE, RequestedServers
from rankless.extensions.servers.launch.addresses import reserve_address
from rankless.extensions.servers.launch.server_hosts import divide_servers, place_copies
from rankless.launch.extension_process_role import JoinedHosts
from rankless.launch.rendezvous.control_server import ANSWER_TIMEOUT_SECONDS, announced_failures, receive_answers
from rankless.launch.rendezvous.host_consistency import HostFacts, RoleFacts
from rankless.launch.rendezvous.messages import RoleMessage

_SALT_BYTES = 32


class ReserveServers(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver reserves the addresses of its parameter servers."""

    endpoints: tuple[str, ...]
    """HOST:PORT of each, or HOST for a free port."""


class ServersReserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """The addresses that the sender has reserved, in the order of the endpoints."""

    addresses: tuple[str, ...]


class ServersRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The sender cannot reserve an address of its servers."""

    expected: str
    found: str
    fix: str


def reserve_addresses(endpoints: Sequence[str], held: contextlib.ExitStack, outward: str) -> tuple[str, ...]:
    """Reserve addresses of this host until `held` is closed, and return them as ZeroMQ's.

    Raises `ConfigError` for one that is not free.
    """
    return tuple(reserve_address(each, held, outward=outward) for each in endpoints)


def answer_reservation(content: Any, held: contextlib.ExitStack, outward: str) -> Any:
    """Reserve what host 0 requests until `held` is closed, and return what to send it.

    Args:
        content: A `ReserveServers` as plain values.
        held: Its end releases the addresses.
        outward: This host's address on its route to host 0.
    """
    answer: ServersReserved | ServersRefused
    try:
        endpoints = msgspec.convert(content, ReserveServers).endpoints
        answer = ServersReserved(addresses=reserve_addresses(endpoints, held, outward))
    except RanklessError as error:
        answer = ServersRefused(expected=str(error.expected), found=str(error.found), fix=error.fix)
    return msgspec.to_builtins(answer)


def agree_on_servers(
    role: str, requested: RequestedServers, held: contextlib.ExitStack, hosts: JoinedHosts
) -> AgreedProcesses:
    """Return the servers of a run, whose addresses are reserved then.

    Args:
        role: The name of the role.
        requested: The servers that the user requests.
        held: Its end releases the addresses of this host, which is host 0.
        hosts: All hosts of the run.

    Raises:
        JoinError: An address is no host's or several hosts', is not free, or a host does not answer. The other hosts
            receive it too.
        ConfigError: The same for an address of this host.
        RendezvousInterrupted: On a signal.
    """
    facts, names = hosts.facts, hosts.names
    with announced_failures(hosts.server):
        places = _find_hosts(role, requested, facts, names)
        wanted = {host: _list_endpoints(requested, places, host, facts[host].address) for host in sorted(set(places))}
        for host in wanted.keys() - {0}:
            content = msgspec.to_builtins(ReserveServers(endpoints=wanted[host]))
            hosts.server.send(host, RoleMessage(role=role, content=content))
        addresses = {0: reserve_addresses(wanted.get(0, ()), held, facts[0].address)}
        answers = receive_answers(
            hosts.server, (RoleMessage,), wanted.keys() - {0}, names=names, interrupts=hosts.interrupts
        )
        for host in sorted(wanted.keys() - {0}):
            addresses[host] = _read_answer(answers, host, names)
        found = {host: iter(each) for host, each in addresses.items()}
        return AgreedProcesses(
            addresses=tuple(next(found[host]) for host in places),
            hosts=places,
            role=SERVER_ROLE,
            replicas=requested.replicas,
            salt=secrets.token_hex(_SALT_BYTES),
        )


def _find_hosts(
    role: str, requested: RequestedServers, facts: Sequence[HostFacts], names: Sequence[str]
) -> tuple[int, ...]:
    """Return the index of each server's host."""
    hosts = _find_first_hosts(requested, [each.roles[role] for each in facts], names)
    if not requested.replicas:
        return hosts
    candidates = sorted(set(hosts)) if requested.endpoints else range(len(facts))
    if len(candidates) == 1:
        raise JoinError(
            expected="addresses of two hosts or more in --servers with --copies 1, which puts copies on another host",
            found=f"{', '.join(requested.endpoints)}, all on {names[hosts[0]]}",
            fix="add a server on another host, or omit --copies",
        )
    return (*hosts, *place_copies(hosts, candidates))


def _find_first_hosts(requested: RequestedServers, facts: Sequence[RoleFacts], names: Sequence[str]) -> tuple[int, ...]:
    """Return the index of the host of each server without copies."""
    if not requested.endpoints:
        return divide_servers(requested.count, len(facts))
    found = [[host for host, each in enumerate(facts) if server in each.own] for server in range(requested.count)]
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


def _read_answer(answers: Mapping[int, RoleMessage], host: int, names: Sequence[str]) -> tuple[str, ...]:
    if host not in answers:
        raise JoinError(
            expected=f"{names[host]} to reserve the addresses of its servers",
            found=f"no answer within {ANSWER_TIMEOUT_SECONDS:g} s",
            fix="look at that host: it may be overloaded",
        )
    answer = msgspec.convert(answers[host].content, ServersReserved | ServersRefused)
    if isinstance(answer, ServersRefused):
        raise JoinError(expected=answer.expected, found=f"on {names[host]}: {answer.found}", fix=answer.fix)
    return answer.addresses
