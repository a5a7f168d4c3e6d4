"""Looking at a host's network from inside: its name, its cards, proxies, the job's port."""

import fnmatch
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.environment import hosts_without_proxy, loopback_name, user_interfaces, user_proxies
from rankless.config.hosts import addresses_of, interface_of, interface_towards, is_loopback, own_addresses
from rankless.launch.doctor.probe_protocol import Look
from rankless.launch.ports import taken_by
from rankless.records.check_results import Row, failed, passed, warned

_VIRTUAL = re.compile(
    r"^(docker|br-[0-9a-f]{6}|virbr|veth|tun|tap|wg|vbox|vmnet|cni|flannel|cali|podman|lxc|lxdbr|tailscale|zt|dummy|utun)"
)


def own_name(look: Look) -> Row:
    """Whether the name that this host has for itself means an address by which others reach it."""
    what, name = "own name", socket.gethostname()
    found = sorted(addresses_of(name))
    own = own_addresses()
    outward = [address for address in found if not is_loopback(address)]
    foreign = [address for address in outward if address not in own]
    meaning = f"{name} means {', '.join(found)}" if found else f"{name} does not resolve here"
    card = own_card(look)
    fix = (
        "Rankless goes by addresses and works; for programs that go by the name, write into /etc/hosts: "
        f"{card[1] if card is not None else 'ADDRESS'} {name}"
    )
    if not look.has_several or (outward and not foreign):
        return passed(what, meaning)
    if foreign:
        return warned(what, f"{name} means {', '.join(foreign)}, which is no address of this host", fix)
    return warned(what, meaning + (", which is this host to itself alone" if found else ""), fix)


def network_card(look: Look) -> Row:
    """Which card a job would use here, whether it leads to all others, and whether the user has chosen another."""
    what = "network card"
    if not look.has_several:
        return _loopback(what)
    ways: dict[str, list[str]] = {}
    for host in look.others:
        # Host 0 is the only one that the others must know by name: workers tell each other their addresses.
        tell = warned if look.is_first or host != look.others[0] else failed
        try:
            card, address = interface_towards(host)
        except socket.gaierror:
            return tell(what, f"the name {host} does not resolve here", _resolving(host))
        except OSError as error:
            fix = "see `ip route`, and whether the cable, the VPN or the virtual network is there"
            return tell(what, f"no way leads from here to {host}: {error.strerror or error}", fix)
        if itself := sorted(addresses_of(host) & own_addresses()):
            return warned(what, f"{host} means this host itself here ({itself[0]})", _resolving(host))
        ways.setdefault(f"{card} ({address})", []).append(host)
    chosen = own_card(look)
    if chosen is None:
        return passed(what, "no other host's address is known here")
    seen = "; ".join(f"{card} leads to {', '.join(hosts)}" for card, hosts in ways.items())
    return _judged(what, seen or f"{chosen[0]} ({chosen[1]}) has the address in the list", chosen[0], ways)


def own_card(look: Look) -> tuple[str, str] | None:
    """The name and address of the card that a job would use here: the way to host 0; on host 0, where its name is."""
    with suppress(OSError):
        if look.is_first:
            for address in sorted(addresses_of(look.name) & own_addresses()):
                if not is_loopback(address):
                    return interface_of(address), address
        if look.others:
            return interface_towards(look.others[0])
    return None


def proxies(look: Look) -> Row:
    """Whether proxies are set that stand between the hosts."""
    what = "proxies"
    found = user_proxies()
    if not found:
        return passed(what, "none is set")
    excepted = hosts_without_proxy()
    others = look.others or ("localhost",)
    named = ", ".join(f"{name}={_without_password(value)}" for name, value in sorted(found.items()))
    if all(_is_excepted(host, excepted) for host in others):
        return passed(what, f"{named}, but not for {', '.join(others)}")
    return warned(
        what,
        f"{named}: Rankless, Gloo and NCCL use none, workers keep it, and the script's own HTTP and gRPC go there",
        f"if the hosts are to be reached without it: export no_proxy={','.join([*excepted, *others])}",
    )


def free_port(look: Look) -> Row:
    """Whether host 0 can wait for the others where they will look for it."""
    what = f"port {look.port}"
    card = own_card(look)
    address = "" if card is None else card[1]
    why = taken_by(look.port, address)
    if why is None:
        return passed(what, "free")
    if not look.has_several:
        return warned(what, why, "end it, or give --port to jobs on several hosts: they alone need one")
    others = range(look.port + 1, min(look.port + 100, 65536))
    free = next((f" {port}" for port in others if taken_by(port, address) is None), "")
    return failed(what, why, f"end it, or choose another port on every host: --port{free}")


def _loopback(what: str) -> Row:
    name = loopback_name()
    card = psutil.net_if_stats().get(name)
    if card is not None and card.isup:
        return passed(what, f"{name} is up: the workers of one host talk over it")
    return failed(what, f"{name} is down: the workers of one host talk over it", f"as root: ip link set {name} up")


def _judged(what: str, seen: str, card: str, ways: Mapping[str, Sequence[str]]) -> Row:
    present = sorted(psutil.net_if_addrs())
    virtual = [name for name in present if _VIRTUAL.match(name) and name != card]
    if virtual:
        seen += f"; virtual and passed over: {', '.join(virtual)}"
    for variable, value in user_interfaces().items():
        named = _named(variable, value, present)
        advice = f"unset {variable}: Rankless names {card} itself"
        if not named:
            return failed(what, f"{variable}={value} names no card here; {seen}", advice)
        if card not in named:
            return warned(what, f"{variable}={value} means {', '.join(named)}, but {seen}", advice)
    if any(way.partition(" ")[0] != card for way in ways):
        advice = f"list the hosts by addresses in one network; Rankless names {card} to Gloo and NCCL"
        return warned(what, seen, advice)
    if _VIRTUAL.match(card):
        advice = "list the hosts by the addresses of their cards"
        return warned(what, f"{seen}: a tunnel or a bridge, slower than a card", advice)
    return passed(what, seen)


def _named(variable: str, value: str, present: list[str]) -> list[str]:
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


def _is_excepted(host: str, excepted: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(host, f"*{each}") if each.startswith(".") else each in (host, "*") for each in excepted)


def _without_password(value: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", value)


def _resolving(host: str) -> str:
    return f"write the address by which the others reach {host} into /etc/hosts here, or list the hosts by addresses"
