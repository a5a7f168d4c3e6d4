"""The choice of a launcher whose conventions a run follows, as data that travels between hosts."""

from typing import TypeVar

import msgspec

Settings = TypeVar("Settings", bound=msgspec.Struct)


class LauncherChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher other than `rankless run`, and how its command line sets it up."""

    name: str
    """A package of `rankless.launchers`."""
    settings: bytes
    """The launcher's own settings as JSON. Only its package reads them."""


def choose_launcher(name: str, settings: msgspec.Struct) -> LauncherChoice:
    """Return the choice of the launcher `name` with `settings`."""
    return LauncherChoice(name=name, settings=msgspec.json.encode(settings))


def decode_settings(settings: bytes, kind: type[Settings]) -> Settings:
    """Return the settings of a `LauncherChoice` as the struct that its launcher defines."""
    return msgspec.json.decode(settings, type=kind)
