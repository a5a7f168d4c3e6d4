"""The launcher whose conventions a run follows, with its settings, as data that travels between hosts."""

from typing import TypeVar

import msgspec

from rankless.records.encoding import encode_json

Settings = TypeVar("Settings", bound=msgspec.Struct)


class LauncherSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher other than `rankless run`, and how its command line sets it up."""

    name: str
    """An extension with a launcher profile."""
    settings: bytes
    """The launcher's own settings as JSON. Only its package reads them."""


def make_launcher_spec(name: str, settings: msgspec.Struct) -> LauncherSpec:
    """Return the spec of the launcher `name` with `settings`."""
    return LauncherSpec(name=name, settings=encode_json(settings))


def decode_settings(settings: bytes, kind: type[Settings]) -> Settings:
    """Return the settings of a `LauncherSpec` as the struct that its launcher defines."""
    return msgspec.json.decode(settings, type=kind)
