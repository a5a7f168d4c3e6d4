"""Converts the keywords of `horovod.run` to options of horovodrun."""

import warnings
from collections.abc import Mapping
from typing import Any

from rankless.extensions.horovodrun.parser import HorovodrunFlags

_SAME_NAMES = (
    *("reset_limit", "hosts", "hostfile", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename"),
    "mpi_args",
)


def make_flags(keywords: Mapping[str, Any]) -> HorovodrunFlags:
    """Return the flags for the keywords. Raises ValueError for two that exclude each other."""
    if keywords["hosts"] is not None and keywords["hostfile"] is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if keywords["use_gloo"] and keywords["use_mpi"]:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    cooldown, interfaces = keywords["cooldown_range"], keywords["network_interface"]
    return HorovodrunFlags(
        num_proc=_resolve_renamed(keywords, "num_proc", "np", default=1),
        min_num_proc=_resolve_renamed(keywords, "min_num_proc", "min_np"),
        max_num_proc=_resolve_renamed(keywords, "max_num_proc", "max_np"),
        slots_per_host=keywords["slots"],
        blacklist_cooldown_range=None if cooldown is None else tuple(cooldown),
        disable_cache=bool(keywords["disable_cache"]),
        verbose=bool(keywords["verbose"]),
        gloo=bool(keywords["use_gloo"]),
        mpi=bool(keywords["use_mpi"]),
        network_interfaces=tuple(interfaces.split(",")) if interfaces else (),
        **{name: keywords[name] for name in _SAME_NAMES},
    )


def _resolve_renamed(keywords: Mapping[str, Any], name: str, old: str, *, default: int | None = None) -> int | None:
    """Return the value of a keyword, or of its old name if the new one is not used."""
    value: int | None = keywords[name]
    if keywords[old] is None:
        return value
    warnings.warn(f"{old} is deprecated, use {name} instead", DeprecationWarning, stacklevel=4)
    return int(keywords[old]) if value == default else value
