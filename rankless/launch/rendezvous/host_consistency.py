"""The properties that all hosts must share before a job starts: otherwise results may differ, or the run may hang."""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType

import msgspec

from rankless.config.extensions import find_extension
from rankless.config.run_config import Program
from rankless.version import VERSION

MAX_CLOCK_SKEW_SECONDS = 30.0
NOT_INSTALLED = "not installed"
_COMMON_VERSIONS = ("the version of Python", "the version of Rankless")
"""Those that also hosts without workers must share."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


class RoleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one host knows of the processes of a role before the run starts."""

    requested: tuple[str, ...]
    """What all hosts must request alike, as texts to compare."""
    own: tuple[int, ...] = ()
    """Those of the processes whose given addresses are this host's."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one host, which it sends when it joins."""

    name: str
    versions: Mapping[str, str]
    """Of Python, torch, NCCL and Rankless."""
    program: str
    """The kind of the program, and its name on this host."""
    program_digest: str
    arguments: tuple[str, ...]
    hosts: tuple[str, ...]
    """The job's hosts with their numbers of workers, as given on this host: "a:4"."""
    devices: tuple[str, ...]
    """The devices of this host's workers."""
    roles: Mapping[str, RoleFacts] = {}
    """The processes of the job beside its workers, as given on this host, by the name of their role."""
    address: str = ""
    """This host's address on its route to host 0."""
    time_seconds: float
    """This host's clock when it sent the facts."""


class HostDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One property in which a host differs from host 0."""

    what: str
    there: str
    here: str
    fix: str


def collect_host_facts(
    program: Program,
    *,
    hosts: Sequence[str],
    devices: Sequence[str],
    address: str = "",
    roles: Mapping[str, RoleFacts] = MappingProxyType({}),
) -> HostFacts:
    """Return the facts of this host."""
    return HostFacts(
        name=socket.gethostname(),
        versions=installed_versions(),
        program=f"{program.kind} {program.target}" if program.kind != "code" else "code",
        program_digest=compute_digest(program),
        arguments=program.arguments,
        hosts=tuple(hosts),
        devices=tuple(devices),
        roles=dict(roles),
        address=address,
        time_seconds=time.time(),
    )


def installed_versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts of a job."""
    return {
        "Python": platform.python_version(),
        "torch": _find_version("torch"),
        "NCCL": next(
            (found for name in NCCL_PACKAGES if (found := _find_version(name)) != NOT_INSTALLED), NOT_INSTALLED
        ),
        "Rankless": VERSION,
    }


def find_version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[HostDifference]:
    """Return the versions in which another host differs."""
    return [
        HostDifference(
            what=f"the version of {name}",
            there=there.get(name, NOT_INSTALLED),
            here=version,
            fix=f"install {name} {version} there",
        )
        for name, version in here.items()
        if there.get(name, NOT_INSTALLED) != version
    ]


def find_differences(here: HostFacts, there: HostFacts, *, received_seconds: float) -> list[HostDifference]:
    """Return what differs between host 0 and another host.

    `received_seconds` is host 0's clock when `there` arrived.
    """
    # A host of servers alone runs no program, and needs no torch. Without a run, as in the doctor, none has devices.
    runs_program = bool(there.devices) or not here.devices
    found = [
        each
        for each in find_version_differences(here.versions, there.versions)
        if runs_program or each.what in _COMMON_VERSIONS
    ]
    if runs_program and there.program_digest != here.program_digest:
        found.append(
            HostDifference(
                what=f"the {here.program}",
                there=f"another text (SHA-256 {there.program_digest[:12]})",
                here=f"SHA-256 {here.program_digest[:12]}",
                fix="copy the same script to all hosts; --send-script sends host 0's",
            )
        )
    if there.arguments != here.arguments:
        found.append(
            HostDifference(
                what="the script's arguments",
                there=" ".join(there.arguments) or "none",
                here=" ".join(here.arguments) or "none",
                fix="use the same command line on every host",
            )
        )
    found += _find_differences_in_hosts(here, there)
    skew = there.time_seconds - received_seconds
    if abs(skew) > MAX_CLOCK_SKEW_SECONDS:
        found.append(
            HostDifference(
                what="the clock",
                there=f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
                here="right",
                fix="set the clocks: timedatectl set-ntp true",
            )
        )
    return found


def _find_differences_in_hosts(here: HostFacts, there: HostFacts) -> list[HostDifference]:
    found = []
    if there.hosts != here.hosts:
        found.append(
            HostDifference(
                what="the hosts of the job",
                there=", ".join(there.hosts),
                here=", ".join(here.hosts),
                fix="name the same hosts, in the same order, with the same numbers of workers, on every host",
            )
        )
    for name in sorted(here.roles.keys() | there.roles.keys()):
        requested = [each.roles[name].requested if name in each.roles else () for each in (there, here)]
        if requested[0] != requested[1]:
            extension = find_extension(name)
            found.append(
                HostDifference(
                    what=name if extension is None or extension.role is None else extension.role.title,
                    there=", ".join(requested[0]) or "none",
                    here=", ".join(requested[1]) or "none",
                    fix=f"give the same options about {name} on every host",
                )
            )
    return found


def compute_digest(program: Program) -> str:
    """Return the SHA-256 of the program's text, or of its name if the text cannot be found without an import."""
    text = program.target.encode()
    path = program.target
    if program.kind == "module":
        path = program.target.replace(".", os.sep)
        path = os.path.join(path, "__main__.py") if os.path.isdir(path) else path + ".py"
    if program.kind != "code" and os.path.isfile(path):
        with open(path, "rb") as file:
            text = file.read()
    return hashlib.sha256(text).hexdigest()


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
