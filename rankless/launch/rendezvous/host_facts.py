"""What hosts compare before a job starts: what would make the same script another program, or a run that hangs."""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata

import msgspec

from rankless.config.run_config import Program
from rankless.version import VERSION

MOST_SKEW_SECONDS = 30.0
"""Between two hosts' clocks."""
NOT_THERE = "not installed"
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as it tells of itself when it joins."""

    name: str
    versions: Mapping[str, str]
    """Of Python, torch, NCCL and Rankless."""
    program: str
    """Its kind and what it is called there."""
    program_digest: str
    arguments: tuple[str, ...]
    hosts: tuple[str, ...]
    """The job's hosts with their numbers of workers, as this one was told: "a:4"."""
    devices: tuple[str, ...]
    """Of its workers."""
    address: str = ""
    """By which its way to host 0 leads."""
    time_seconds: float
    """Its clock's, as it was sent."""


class HostDifference(msgspec.Struct, frozen=True, kw_only=True):
    """What one host has otherwise than host 0."""

    what: str
    there: str
    here: str
    fix: str


def collect_host_facts(
    program: Program, *, hosts: Sequence[str], devices: Sequence[str], address: str = ""
) -> HostFacts:
    """This host's own."""
    return HostFacts(
        name=socket.gethostname(),
        versions=installed_versions(),
        program=f"{program.kind} {program.target}" if program.kind != "code" else "code",
        program_digest=digest_of(program),
        arguments=program.arguments,
        hosts=tuple(hosts),
        devices=tuple(devices),
        address=address,
        time_seconds=time.time(),
    )


def installed_versions() -> dict[str, str]:
    """What all hosts of a job must have alike."""
    return {
        "Python": platform.python_version(),
        "torch": _version("torch"),
        "NCCL": next((found for name in NCCL_PACKAGES if (found := _version(name)) != NOT_THERE), NOT_THERE),
        "Rankless": VERSION,
    }


def find_version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[HostDifference]:
    """Where another host has other versions."""
    return [
        HostDifference(
            what=f"the version of {name}",
            there=there.get(name, NOT_THERE),
            here=version,
            fix=f"install {name} {version} there",
        )
        for name, version in here.items()
        if there.get(name, NOT_THERE) != version
    ]


def find_differences(here: HostFacts, there: HostFacts, *, received_seconds: float) -> list[HostDifference]:
    """In what another host's facts differ from host 0's; `received_seconds` is host 0's clock as they came."""
    found = find_version_differences(here.versions, there.versions)
    if there.program_digest != here.program_digest:
        found.append(
            HostDifference(
                what=f"the {here.program}",
                there=f"another text (SHA-256 {there.program_digest[:12]})",
                here=f"SHA-256 {here.program_digest[:12]}",
                fix="bring the same script to all hosts; --copy sends host 0's",
            )
        )
    if there.arguments != here.arguments:
        found.append(
            HostDifference(
                what="the script's arguments",
                there=" ".join(there.arguments) or "none",
                here=" ".join(here.arguments) or "none",
                fix="type the same line on every host",
            )
        )
    if there.hosts != here.hosts:
        found.append(
            HostDifference(
                what="the hosts of the job",
                there=", ".join(there.hosts),
                here=", ".join(here.hosts),
                fix="name the same hosts, in the same order, with the same numbers of workers, on every host",
            )
        )
    skew = there.time_seconds - received_seconds
    if abs(skew) > MOST_SKEW_SECONDS:
        found.append(
            HostDifference(
                what="the clock",
                there=f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
                here="right",
                fix="set the clocks: timedatectl set-ntp true",
            )
        )
    return found


def digest_of(program: Program) -> str:
    """SHA-256 of the program's text; of a module's, where it can be found without importing anything."""
    text = program.target.encode()
    path = program.target
    if program.kind == "module":
        path = program.target.replace(".", os.sep)
        path = os.path.join(path, "__main__.py") if os.path.isdir(path) else path + ".py"
    if program.kind != "code" and os.path.isfile(path):
        with open(path, "rb") as file:
            text = file.read()
    return hashlib.sha256(text).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_THERE
