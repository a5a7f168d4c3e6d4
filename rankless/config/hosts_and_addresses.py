"""The hosts of a job: parsed from a list, a file or code; which of them is this one; and endpoints on hosts."""

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 9988

_ITEM = re.compile(r"^(?:(?P<user>[^@\[\]:]+)@)?(?P<address>\[[0-9A-Fa-f:.%\w]+\]|[^@\[\]:]+)(?::(?P<workers>[^:]*))?$")

_ENDPOINT = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s/@:\[\]]+))(?::(?P<port>\d+))?|(?P<bare>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*)"
)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the job, under the name or address by which the others reach it."""

    address: str
    workers: int
    heterogeneous: int = 0
    """How many of the workers are heterogeneous. They have the last ranks of the host."""
    user: str | None = None
    """The user for ssh; None lets ssh choose."""

    def __str__(self) -> str:
        return self.address

    @property
    def ssh_target(self) -> str:
        """What ssh takes for the host, as "user@10.0.0.2"."""
        return self.address if self.user is None else f"{self.user}@{self.address}"


class Endpoint(msgspec.Struct, frozen=True):
    """A host and, if it is given, a port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def parse_hosts(text: str, *, workers_per_host: int | None) -> tuple[Host, ...]:
    """Return the hosts of `--hosts a:4,b:4`. `workers_per_host` is `-n`, for hosts without a number."""
    items = [item.strip() for item in text.split(",")]
    found = []
    for item in items:
        match = _ITEM.match(item)
        if match is None:
            raise _unreadable(item, "--hosts as a:4,b:4, user@a:4 or [::1]:4")
        found.append(_host(match["address"].strip("[]"), match["workers"], match["user"], workers_per_host, item))
    return check_hosts(found)


def read_hostfile(path: str, *, workers_per_host: int | None) -> tuple[Host, ...]:
    """Return the hosts of a file with lines as `host slots=N`; `#` begins a comment."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            expected="a file of hosts, one a line, as `10.0.0.1 slots=4`",
            found=f"{path}: {getattr(error, 'strerror', None) or error}",
            fix="check the path given to --hostfile",
        ) from None
    found = []
    for words in filter(None, lines):
        options = dict(word.partition("=")[::2] for word in words[1:])
        user, _, address = words[0].rpartition("@")
        slots = options.get("slots")
        if slots is None and words[0].count(":") == 1:
            address, _, slots = address.partition(":")
        if set(options) - {"slots", "max_slots", "max-slots"}:
            raise _unreadable(" ".join(words), f"lines as `10.0.0.1 slots=4` in {path}")
        found.append(_host(address.strip("[]"), slots, user or None, workers_per_host, " ".join(words)))
    if not found:
        raise ConfigError(expected=f"hosts in {path}", found="none", fix="write one a line, as `10.0.0.1 slots=4`")
    return check_hosts(found)


def parse_host_settings(items: Sequence[Any], *, workers_per_host: int) -> tuple[Host, ...]:
    """Return the hosts that a script names: strings, or OneFlow's `{"addr": …}`."""
    found = []
    for item in items:
        address = item.get("addr") if isinstance(item, Mapping) else item
        if not isinstance(address, str) or not address or (isinstance(item, Mapping) and set(item) != {"addr"}):
            raise ConfigError(
                expected='hosts=["10.7.0.1", {"addr": "10.7.0.2"}]: names or addresses',
                found=repr(item),
                fix="name each host by the address under which the others reach it",
            )
        found.append(_host(address.strip("[]"), None, None, workers_per_host, address))
    return check_hosts(found)


def numbered_hosts(address: str, count: int, *, workers: int) -> tuple[Host, ...]:
    """Return `count` hosts of which only the first one's address is known."""
    names = [address.strip("[]"), *(f"host {number}" for number in range(1, count))]
    return tuple(Host(address=name, workers=workers) for name in names)


def check_hosts(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts. Raises `ConfigError` if there is none, or if one is named twice."""
    if not hosts:
        raise ConfigError(expected="at least one host", found="none", fix="name the hosts, as a:4,b:4")
    addresses = [host.address for host in hosts]
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated:
        workers = sum(host.workers for host in hosts if host.address == repeated[0])
        raise ConfigError(
            expected="each host once",
            found=f"{repeated[0]} {addresses.count(repeated[0])} times",
            fix=f"name it once, with the number of its workers: {repeated[0]}:{workers}",
        )
    return tuple(hosts)


def own_host_index(hosts: Sequence[Host]) -> int:
    """Return the index of this host, found by its addresses. Raises `ConfigError` for no match, and for several."""
    own = own_addresses()
    found = [index for index, host in enumerate(hosts) if addresses_of(host.address) & own]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(str, hosts))
    if not found:
        unknown = [host.address for host in hosts if not addresses_of(host.address)]
        names = f"; {', '.join(unknown)} {'does' if len(unknown) == 1 else 'do'} not resolve here" if unknown else ""
        correct = f"correct {' and '.join(unknown)}, or add {'it' if len(unknown) == 1 else 'them'} to /etc/hosts; "
        raise ConfigError(
            expected=f"this host among {listed}",
            found=f"{socket.gethostname()}, with {', '.join(outward_addresses()) or 'no address but loopback'}{names}",
            fix=f"{correct if unknown else ''}list it by an address of its own, or start the job on a host of the list",
        )
    raise ConfigError(
        expected="hosts that are different machines",
        found=f"{' and '.join(str(hosts[index]) for index in found)}, which are both this one",
        fix="name each machine once, and not by a name that every host uses for itself, as localhost",
    )


def require_port(port: int) -> None:
    """Raise `ConfigError` unless `--port` is a port."""
    if not 0 < port < 65536:
        raise ConfigError(expected="--port from 1 to 65535", found=port, fix="choose another")


def address_family(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen_on(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on a numeric address only, by default at a free port. Raises `OSError`."""
    return socket.create_server((address, port), family=address_family(address), backlog=1024)


def own_addresses() -> frozenset[str]:
    """Return the addresses of this host's network interfaces, without zones."""
    families = {socket.AF_INET, socket.AF_INET6}
    cards = psutil.net_if_addrs().values()
    found = {item.address.partition("%")[0] for items in cards for item in items if item.family in families}
    return frozenset(found | {"127.0.1.1"})


def outward_addresses() -> list[str]:
    """Return this host's addresses that other hosts may reach, in order."""
    return sorted(each for each in own_addresses() if not is_loopback(each) and not each.startswith("fe80"))


def is_own_loopback_name(name: str) -> bool:
    """Whether a name that others know this host by means a loopback address here, as Debian's /etc/hosts has it."""
    found = addresses_of(name)
    return bool(found) and name not in found and name != "localhost" and all(map(is_loopback, found))


def addresses_of(name: str) -> frozenset[str]:
    """Return the addresses of a name; none if it does not resolve."""
    with suppress(OSError, UnicodeError):
        return frozenset(str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None))
    return frozenset()


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return address.startswith("127.") or address == "::1"


def is_here(name: str) -> bool:
    """Whether a host's name, with or without `user@`, means this machine."""
    found = addresses_of(name.rpartition("@")[2])
    return bool(found & own_addresses()) or (bool(found) and all(map(is_loopback, found)))


def interface_towards(address: str) -> tuple[str, str]:
    """Return the network interface on the route to `address`, and this host's address on it.

    Raises `OSError` if there is no route.
    """
    family, kind, protocol, _, socket_address = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(socket_address)  # sends nothing: it asks the kernel for the route
        own = str(probe.getsockname()[0]).partition("%")[0]
    return interface_of(own), own


def interface_of(address: str) -> str:
    """Return the network interface with an address of this host. Raises `OSError` if none has it."""
    for name, items in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == address for item in items):
            return str(name)
    raise OSError(f"no interface has the address {address}")


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint that HOST:PORT, HOST, [::1]:PORT or ::1 names. Raises `ValueError` for other texts."""
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None or (found["port"] is not None and not 0 < int(found["port"]) < 2**16):
        raise ValueError(text)
    host = found["bracketed"] or found["bare"] or found["name"]
    return Endpoint(host, None if found["port"] is None else int(found["port"]))


def read_endpoints(option: str, text: str, *, example: str, may_repeat: bool = False) -> list[Endpoint]:
    """Return the endpoints of a list separated by commas.

    Raises `ConfigError` for a text that is no such list, and for an endpoint with a port that stands there twice.
    Without a port an endpoint may stand there several times, and `may_repeat` allows it with a port too.
    """
    try:
        found = [parse_endpoint(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(
            expected=f"{option} as a number, or as a list of addresses like {example}",
            found=text,
            fix=f"correct {option}: ports are numbers from 1 to 65535",
        ) from None
    repeated = next((each for each in found if each.port is not None and found.count(each) > 1), None)
    if repeated is not None and not may_repeat:
        raise ConfigError(
            expected=f"each address of {option} once",
            found=f"{repeated} {found.count(repeated)} times",
            fix="give each another port, or omit the ports to get free ones",
        )
    return found


def _host(address: str, workers: str | None, user: str | None, workers_per_host: int | None, item: str) -> Host:
    if workers is None or workers == "":
        count = 1 if workers_per_host is None else workers_per_host
    elif workers.isdigit() and int(workers) > 0:
        count = int(workers)
        if workers_per_host not in (None, count):
            raise ConfigError(
                expected="one number of workers for each host",
                found=f"{item}, and -n {workers_per_host}",
                fix="omit -n, or the number of the host",
            )
    else:
        raise _unreadable(item, "a number of workers from 1 up, as a:4")
    if not address:
        raise _unreadable(item, "a name or an address")
    return Host(address=address, workers=count, user=user)


def _unreadable(item: str, expected: str) -> ConfigError:
    return ConfigError(expected=expected, found=repr(item), fix="write each host as NAME or NAME:WORKERS")


def add_heterogeneous(hosts: Sequence[Host], count: int) -> tuple[Host, ...]:
    """Return hosts with so many heterogeneous workers on each, besides the others."""
    return tuple(
        msgspec.structs.replace(host, workers=host.workers + count, heterogeneous=count) if count else host
        for host in hosts
    )
