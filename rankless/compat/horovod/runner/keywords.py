"""The keywords of `horovod.run` as options of horovodrun."""

import warnings
from collections.abc import Mapping
from typing import Any

from rankless.launchers.horovodrun.options import HorovodrunFlags

_SAME = (
    *("reset_limit", "hosts", "hostfile", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename"),
    "mpi_args",
)


def flags_of(given: Mapping[str, Any]) -> HorovodrunFlags:
    """What the keywords say. Raises ValueError for two that exclude each other."""
    if given["hosts"] is not None and given["hostfile"] is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if given["use_gloo"] and given["use_mpi"]:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    cooldown, interfaces = given["cooldown_range"], given["network_interface"]
    return HorovodrunFlags(
        num_proc=_renamed(given, "num_proc", "np", default=1),
        min_num_proc=_renamed(given, "min_num_proc", "min_np"),
        max_num_proc=_renamed(given, "max_num_proc", "max_np"),
        slots_per_host=given["slots"],
        blacklist_cooldown_range=None if cooldown is None else tuple(cooldown),
        disable_cache=bool(given["disable_cache"]),
        verbose=bool(given["verbose"]),
        gloo=bool(given["use_gloo"]),
        mpi=bool(given["use_mpi"]),
        network_interfaces=tuple(interfaces.split(",")) if interfaces else (),
        **{name: given[name] for name in _SAME},
    )


def _renamed(given: Mapping[str, Any], name: str, old: str, *, default: int | None = None) -> int | None:
    """The value of a keyword, or of its old name if the new one has not been used."""
    value: int | None = given[name]
    if given[old] is None:
        return value
    warnings.warn(f"{old} is deprecated, use {name} instead", DeprecationWarning, stacklevel=4)
    return int(given[old]) if value == default else value
