"""Check a host's network from inside: its name, its network cards, proxies, and the job's port."""

import fnmatch
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.environment import hosts_without_proxy, loopback_name, user_interfaces, user_proxies
from rankless.config.hosts_and_addresses import (
    addresses_of,
    interface_of,
    interface_towards,
    is_loopback,
    own_addresses,
)
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.launch.ports import find_port_conflict
from rankless.records.doctor_records import CheckResult, make_failure, make_pass, make_warning

_VIRTUAL = re.compile(
    r"^(docker|br-[0-9a-f]{6}|virbr|veth|tun|tap|wg|vbox|vmnet|cni|flannel|cali|podman|lxc|lxdbr|tailscale|zt|dummy|utun)"
)


def check_own_name(request: CheckHost) -> CheckResult:
    """Check that this host's name resolves to an address at which other hosts reach it."""
    check_name, name = "own name", socket.gethostname()
    found = sorted(addresses_of(name))
    own = own_addresses()
    outward = [address for address in found if not is_loopback(address)]
    foreign = [address for address in outward if address not in own]
    meaning = f"{name} resolves to {', '.join(found)}" if found else f"{name} does not resolve here"
    card = find_own_card(request)
    fix = (
        "Rankless uses addresses and works; for programs that use the name, add to /etc/hosts: "
        f"{card[1] if card is not None else 'ADDRESS'} {name}"
    )
    if not request.has_several or (outward and not foreign):
        return make_pass(check_name, meaning)
    if foreign:
        return make_warning(
            check_name, f"{name} resolves to {', '.join(foreign)}, which is not an address of this host", fix
        )
    return make_warning(check_name, meaning + (", which other hosts cannot reach" if found else ""), fix)


def check_network_card(request: CheckHost) -> CheckResult:
    """Check which network card a job would use, whether it reaches all hosts, and whether the user chose another."""
    check_name = "network card"
    if not request.has_several:
        return _check_loopback(check_name)
    routes: dict[str, list[str]] = {}
    for host in request.others:
        # The other hosts must resolve only host 0's name: workers exchange their addresses.
        make_result = make_warning if request.is_first or host != request.others[0] else make_failure
        try:
            card, address = interface_towards(host)
        except socket.gaierror:
            return make_result(check_name, f"the name {host} does not resolve here", _fix_for_name(host))
        except OSError as error:
            fix = "check `ip route`, and the cable, the VPN or the virtual network"
            return make_result(check_name, f"no route from here to {host}: {error.strerror or error}", fix)
        if itself := sorted(addresses_of(host) & own_addresses()):
            return make_warning(
                check_name, f"{host} resolves to this host itself here ({itself[0]})", _fix_for_name(host)
            )
        routes.setdefault(f"{card} ({address})", []).append(host)
    chosen = find_own_card(request)
    if chosen is None:
        return make_pass(check_name, "no other host's address is known here")
    seen = "; ".join(f"{card} reaches {', '.join(hosts)}" for card, hosts in routes.items())
    return _evaluate_card(check_name, seen or f"{chosen[0]} ({chosen[1]}) has the listed address", chosen[0], routes)


def find_own_card(request: CheckHost) -> tuple[str, str] | None:
    """Return the name and address of the card that a job would use here.

    On host 0 this is the card with the listed address, elsewhere the card on the route to host 0.
    """
    with suppress(OSError):
        if request.is_first:
            for address in sorted(addresses_of(request.name) & own_addresses()):
                if not is_loopback(address):
                    return interface_of(address), address
        if request.others:
            return interface_towards(request.others[0])
    return None


def check_proxies(request: CheckHost) -> CheckResult:
    """Check whether the configured proxies would stand between the hosts."""
    check_name = "proxies"
    found = user_proxies()
    if not found:
        return make_pass(check_name, "none set")
    no_proxy_hosts = hosts_without_proxy()
    others = request.others or ("localhost",)
    named = ", ".join(f"{name}={_redact_password(value)}" for name, value in sorted(found.items()))
    if all(_bypasses_proxy(host, no_proxy_hosts) for host in others):
        return make_pass(check_name, f"{named}, but not for {', '.join(others)}")
    return make_warning(
        check_name,
        f"{named}: Rankless, Gloo and NCCL ignore it, but HTTP and gRPC calls of the script use it",
        f"to reach the hosts without it: export no_proxy={','.join([*no_proxy_hosts, *others])}",
    )


def check_free_port(request: CheckHost) -> CheckResult:
    """Check that host 0 can listen on the port at which the others connect."""
    check_name = f"port {request.port}"
    card = find_own_card(request)
    address = "" if card is None else card[1]
    why = find_port_conflict(request.port, address)
    if why is None:
        return make_pass(check_name, "free")
    if not request.has_several:
        return make_warning(
            check_name, why, "end that process, or set --port for jobs on several hosts; other jobs need no port"
        )
    others = range(request.port + 1, min(request.port + 100, 65536))
    free = next((f" {port}" for port in others if find_port_conflict(port, address) is None), "")
    return make_failure(check_name, why, f"end that process, or choose another port on every host: --port{free}")


def _check_loopback(check_name: str) -> CheckResult:
    name = loopback_name()
    card = psutil.net_if_stats().get(name)
    if card is not None and card.isup:
        return make_pass(check_name, f"{name} is up: workers on one host communicate over it")
    return make_failure(
        check_name, f"{name} is down: workers on one host communicate over it", f"as root: ip link set {name} up"
    )


def _evaluate_card(check_name: str, seen: str, card: str, routes: Mapping[str, Sequence[str]]) -> CheckResult:
    present = sorted(psutil.net_if_addrs())
    virtual = [name for name in present if _VIRTUAL.match(name) and name != card]
    if virtual:
        seen += f"; virtual cards skipped: {', '.join(virtual)}"
    for variable, value in user_interfaces().items():
        named = _match_interfaces(variable, value, present)
        advice = f"unset {variable}: Rankless selects {card} itself"
        if not named:
            return make_failure(check_name, f"{variable}={value} matches no card here; {seen}", advice)
        if card not in named:
            return make_warning(check_name, f"{variable}={value} selects {', '.join(named)}, but {seen}", advice)
    if any(way.partition(" ")[0] != card for way in routes):
        advice = f"list the hosts by addresses in one network; Rankless selects {card} for Gloo and NCCL"
        return make_warning(check_name, seen, advice)
    if _VIRTUAL.match(card):
        advice = "list the hosts by the addresses of their physical cards"
        return make_warning(check_name, f"{seen}: a tunnel or bridge, slower than a physical card", advice)
    return make_pass(check_name, seen)


def _match_interfaces(variable: str, value: str, present: list[str]) -> list[str]:
    """Return the cards that a variable selects, in the syntax of Gloo or NCCL."""
    names = [name for name in value.split(",") if name]
    if variable.startswith("GLOO"):
        return [name for name in present if name in names]
    sign, names = value[0], [name.lstrip("^=") for name in names]
    if value.startswith(("=", "^=")):
        meant = [name for name in present if name in names]
    else:
        meant = [name for name in present if name.startswith(tuple(names))]
    return [name for name in present if name not in meant] if sign == "^" else meant


def _bypasses_proxy(host: str, no_proxy_hosts: tuple[str, ...]) -> bool:
    return any(
        fnmatch.fnmatch(host, f"*{each}") if each.startswith(".") else each in (host, "*") for each in no_proxy_hosts
    )


def _redact_password(value: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", value)


def _fix_for_name(host: str) -> str:
    return f"add the address at which the others reach {host} to /etc/hosts here, or list the hosts by address"
