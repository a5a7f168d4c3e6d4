"""Looking at a host's network from inside: its name, its cards, proxies, the job's port."""

import fnmatch
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.environment import hosts_without_proxy, loopback_name, user_interfaces, user_proxies
from rankless.config.hosts import addresses_of, interface_of, interface_towards, is_loopback, own_addresses
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.launch.ports import taken_by
from rankless.records.check_results import CheckResult, make_failure, make_pass, make_warning

_VIRTUAL = re.compile(
    r"^(docker|br-[0-9a-f]{6}|virbr|veth|tun|tap|wg|vbox|vmnet|cni|flannel|cali|podman|lxc|lxdbr|tailscale|zt|dummy|utun)"
)


def check_own_name(request: CheckHost) -> CheckResult:
    """Whether the name that this host has for itself means an address by which others reach it."""
    check_name, name = "own name", socket.gethostname()
    found = sorted(addresses_of(name))
    own = own_addresses()
    outward = [address for address in found if not is_loopback(address)]
    foreign = [address for address in outward if address not in own]
    meaning = f"{name} means {', '.join(found)}" if found else f"{name} does not resolve here"
    card = find_own_card(request)
    fix = (
        "Rankless goes by addresses and works; for programs that go by the name, write into /etc/hosts: "
        f"{card[1] if card is not None else 'ADDRESS'} {name}"
    )
    if not request.has_several or (outward and not foreign):
        return make_pass(check_name, meaning)
    if foreign:
        return make_warning(check_name, f"{name} means {', '.join(foreign)}, which is no address of this host", fix)
    return make_warning(check_name, meaning + (", which is this host to itself alone" if found else ""), fix)


def check_network_card(request: CheckHost) -> CheckResult:
    """Which card a job would use here, whether it leads to all others, and whether the user has chosen another."""
    check_name = "network card"
    if not request.has_several:
        return _check_loopback(check_name)
    routes: dict[str, list[str]] = {}
    for host in request.others:
        # Host 0 is the only one that the others must know by name: workers tell each other their addresses.
        make_result = make_warning if request.is_first or host != request.others[0] else make_failure
        try:
            card, address = interface_towards(host)
        except socket.gaierror:
            return make_result(check_name, f"the name {host} does not resolve here", _fix_for_name(host))
        except OSError as error:
            fix = "see `ip route`, and whether the cable, the VPN or the virtual network is there"
            return make_result(check_name, f"no way leads from here to {host}: {error.strerror or error}", fix)
        if itself := sorted(addresses_of(host) & own_addresses()):
            return make_warning(check_name, f"{host} means this host itself here ({itself[0]})", _fix_for_name(host))
        routes.setdefault(f"{card} ({address})", []).append(host)
    chosen = find_own_card(request)
    if chosen is None:
        return make_pass(check_name, "no other host's address is known here")
    seen = "; ".join(f"{card} leads to {', '.join(hosts)}" for card, hosts in routes.items())
    return _evaluate_card(
        check_name, seen or f"{chosen[0]} ({chosen[1]}) has the address in the list", chosen[0], routes
    )


def find_own_card(request: CheckHost) -> tuple[str, str] | None:
    """The name and address of the card that a job would use here: the way to host 0; on host 0, where its name is."""
    with suppress(OSError):
        if request.is_first:
            for address in sorted(addresses_of(request.name) & own_addresses()):
                if not is_loopback(address):
                    return interface_of(address), address
        if request.others:
            return interface_towards(request.others[0])
    return None


def check_proxies(request: CheckHost) -> CheckResult:
    """Whether proxies are set that stand between the hosts."""
    check_name = "proxies"
    found = user_proxies()
    if not found:
        return make_pass(check_name, "none is set")
    no_proxy_hosts = hosts_without_proxy()
    others = request.others or ("localhost",)
    named = ", ".join(f"{name}={_redact_password(value)}" for name, value in sorted(found.items()))
    if all(_bypasses_proxy(host, no_proxy_hosts) for host in others):
        return make_pass(check_name, f"{named}, but not for {', '.join(others)}")
    return make_warning(
        check_name,
        f"{named}: Rankless, Gloo and NCCL use none, workers keep it, and the script's own HTTP and gRPC go there",
        f"if the hosts are to be reached without it: export no_proxy={','.join([*no_proxy_hosts, *others])}",
    )


def check_free_port(request: CheckHost) -> CheckResult:
    """Whether host 0 can wait for the others where they will look for it."""
    check_name = f"port {request.port}"
    card = find_own_card(request)
    address = "" if card is None else card[1]
    why = taken_by(request.port, address)
    if why is None:
        return make_pass(check_name, "free")
    if not request.has_several:
        return make_warning(check_name, why, "end it, or give --port to jobs on several hosts: they alone need one")
    others = range(request.port + 1, min(request.port + 100, 65536))
    free = next((f" {port}" for port in others if taken_by(port, address) is None), "")
    return make_failure(check_name, why, f"end it, or choose another port on every host: --port{free}")


def _check_loopback(check_name: str) -> CheckResult:
    name = loopback_name()
    card = psutil.net_if_stats().get(name)
    if card is not None and card.isup:
        return make_pass(check_name, f"{name} is up: the workers of one host talk over it")
    return make_failure(
        check_name, f"{name} is down: the workers of one host talk over it", f"as root: ip link set {name} up"
    )


def _evaluate_card(check_name: str, seen: str, card: str, routes: Mapping[str, Sequence[str]]) -> CheckResult:
    present = sorted(psutil.net_if_addrs())
    virtual = [name for name in present if _VIRTUAL.match(name) and name != card]
    if virtual:
        seen += f"; virtual and passed over: {', '.join(virtual)}"
    for variable, value in user_interfaces().items():
        named = _match_interfaces(variable, value, present)
        advice = f"unset {variable}: Rankless names {card} itself"
        if not named:
            return make_failure(check_name, f"{variable}={value} names no card here; {seen}", advice)
        if card not in named:
            return make_warning(check_name, f"{variable}={value} means {', '.join(named)}, but {seen}", advice)
    if any(way.partition(" ")[0] != card for way in routes):
        advice = f"list the hosts by addresses in one network; Rankless names {card} to Gloo and NCCL"
        return make_warning(check_name, seen, advice)
    if _VIRTUAL.match(card):
        advice = "list the hosts by the addresses of their cards"
        return make_warning(check_name, f"{seen}: a tunnel or a bridge, slower than a card", advice)
    return make_pass(check_name, seen)


def _match_interfaces(variable: str, value: str, present: list[str]) -> list[str]:
    """The cards that a variable means, in Gloo's or NCCL's way of writing."""
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
    return f"write the address by which the others reach {host} into /etc/hosts here, or list the hosts by addresses"
