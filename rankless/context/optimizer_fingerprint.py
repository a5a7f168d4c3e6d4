"""Fingerprint a job's optimizers before each call, so that ranks can check that they will make the same step.

Note [comparing optimizers]: the hyperparameters of all param groups are read and encoded at each call, which takes
microseconds. That includes what a scheduler has set. The state is too large to read. PyTorch counts the in-place
changes of each tensor, so a change outside jobs shows without reading: see `context.changes_outside_jobs`. If the state
of some rank has changed, all ranks must have changed the same values of it, and at the 1st, 2nd, 4th, 8th, … such
change the contents are compared too. As long as nothing has changed, equal steps keep equal states equal.

Ranks that were equal at the last call differ now by what changed since. So a rank posts only its changes, and the rank
that finds a difference knows the values of all ranks.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from rankless.collectives.sync_point_encoding import MAX_DETAILS_BYTES
from rankless.context.changes_outside_jobs import OptimizerChanges, StateEntry
from rankless.records.encoding import encode_msgpack
from rankless.records.number_formatting import format_ranks

MAX_ELEMENTS = 16
"""Tensors on the CPU with at most this many elements are compared by value, such as a learning rate."""
MAX_STATE_ENTRIES = 80
"""Number of changed values of a state that a rank posts."""
SHOWN = 3
FIX_OF_HYPERPARAMETERS = (
    "set hyperparameters and call scheduler.step() on every rank, and with the same values; compute a value that only "
    "one rank knows with rankless.once"
)
FIX_OF_STATE = "load or change the optimizer's state on every rank, and from the same file"

NameParameter = Callable[[Tensor], str]
"""Returns a parameter's name in the script, such as "model.head.weight"."""
Hyperparameter = tuple[int, str]
"""The number of the param group, and the name."""
StateChange = tuple[int, str, int]
"""The number of the parameter, the key, and a checksum of the value."""
PostedChanges = Sequence[Any]
"""What a rank posts of one optimizer: changed hyperparameters, and changed state, None for an unchanged state."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFingerprint:
    """The optimizers of a job at one call."""

    optimizers: tuple[Optimizer, ...]
    name_parameter: NameParameter
    titles: tuple[str, ...]
    digests: tuple[int, ...]
    """Two of each optimizer: of its hyperparameters and of its state."""
    before: tuple[bytes, ...]
    """The hyperparameters of each optimizer at the call before."""
    details: bytes

    def names(self) -> list[str]:
        """Return the names of the digests."""
        return [f"{what} of {title}" for title in self.titles for what in ("hyperparameters", "state")]

    def describe(self, names: Sequence[str], details: Mapping[int, bytes]) -> tuple[str, str] | None:
        """Describe the differences among `names`: the values of all ranks, and the fix. None if they are unknown."""
        posted: dict[int, list[PostedChanges]] = {}
        for rank, data in details.items():
            decoded = msgspec.msgpack.decode(data) if data else [[[], None] for _ in self.titles]
            if decoded is None:  # too long to be posted
                return None
            posted[rank] = decoded
        found: list[str] = []
        fixes: list[str] = []
        for index, title in enumerate(self.titles):
            settings = {rank: changes[index][0] for rank, changes in posted.items()}
            states = {rank: changes[index][1] for rank, changes in posted.items()}
            if f"hyperparameters of {title}" in names and (
                differences := describe_hyperparameters(self.before[index], settings)
            ):
                found.append(shorten(differences))
                fixes.append(FIX_OF_HYPERPARAMETERS)
            if f"state of {title}" in names and (difference := self._describe_state(index, states)):
                found.append(difference)
                fixes.append(FIX_OF_STATE)
        return ("; ".join(found), fixes[0]) if found else None

    def _describe_state(self, index: int, changes: Mapping[int, Sequence[StateChange] | None]) -> str:
        title = self.titles[index]
        unchanged = [rank for rank, changed in changes.items() if changed is None]
        changed = {rank: entries for rank, entries in changes.items() if entries is not None}
        if unchanged:
            what = "; ".join(
                f"{self._list_entries(index, [(number, key) for number, key, _ in entries])} changed outside the job "
                f"on rank {rank}"
                for rank, entries in changed.items()
            )
            return f"state of {title}: {what}, not on {format_ranks(unchanged)}"
        tables = {rank: {(number, key): sum_ for number, key, sum_ in entries} for rank, entries in changed.items()}
        everywhere = set.intersection(*map(set, tables.values()))
        different = sorted(entry for entry in everywhere if len({table[entry] for table in tables.values()}) > 1)
        if not different:
            return ""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, table in tables.items():
            groups.setdefault(tuple(table[entry] for entry in different), []).append(rank)
        ranks = sorted(groups.values(), key=len)
        found = f"{self._list_entries(index, different)} on {format_ranks(ranks[0])}"
        return f"state of {title}: {found}: other values than on {format_ranks(ranks[-1])}"

    def _list_entries(self, index: int, entries: Sequence[tuple[int, str]]) -> str:
        groups = self.optimizers[index].param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        names = [
            f"{key} of {self.name_parameter(parameters[number])}" if 0 <= number < len(parameters) else key
            for number, key in entries
        ]
        return shorten(names, separator=", ") if names else "all of it"


class OptimizerComparison:
    """Fingerprints the optimizers of one job."""

    def __init__(
        self, optimizers: Sequence[Optimizer], changes: OptimizerChanges, *, name_parameter: NameParameter
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._changes = changes
        self._name_parameter = name_parameter
        kinds = [type(optimizer).__name__ for optimizer in optimizers]
        self._titles = tuple(
            f"optimizer {kind}" if len(kinds) == 1 else f"optimizer {number} ({kind})"
            for number, kind in enumerate(kinds)
        )
        self._before = (b"",) * len(kinds)
        self.change_counts = (0,) * len(kinds)
        """Before how many calls the state of each had been changed outside jobs."""

    def fingerprint(self) -> OptimizerFingerprint:
        """Return the fingerprint for the call that is about to be made."""
        before = self._before
        after = tuple(encode_hyperparameters(optimizer) for optimizer in self._optimizers)
        self._before = after
        states = [self._list_state_changes(number) for number in range(len(after))]
        digests: list[int] = []
        for data, changes in zip(after, states, strict=True):
            changed = 0 if changes is None else 1 << 32 | zlib.crc32(encode_msgpack(changes, encoder=ENCODER))
            digests += [zlib.crc32(data), changed]
        details = b""
        if after != before or any(changes is not None for changes in states):
            details = encode_changes([find_changes(*pair) for pair in zip(before, after, strict=True)], states)
        return OptimizerFingerprint(
            optimizers=self._optimizers,
            name_parameter=self._name_parameter,
            titles=self._titles,
            digests=tuple(digests),
            before=before,
            details=details,
        )

    def _list_state_changes(self, number: int) -> list[StateChange] | None:
        changes = self._changes.find_changes(self._optimizers[number])
        if changes is None:
            return None
        counts = self.change_counts
        self.change_counts = (*counts[:number], count := counts[number] + 1, *counts[number + 1 :])
        # A script that changes its state after every step must not stay slow.
        reads_contents = count & (count - 1) == 0
        return [(entry.parameter, entry.key, checksum(entry, reads_contents=reads_contents)) for entry in changes]


def encode_hyperparameters(optimizer: Optimizer) -> bytes:
    """Return all settings of all param groups as bytes. Each group starts with its number of parameters."""
    items: list[tuple[str, Any]] = []
    for group in optimizer.param_groups:
        items.append(("params", len(group["params"])))
        items += [item for item in group.items() if item[0] != "params"]
    try:
        return encode_msgpack(items, encoder=ENCODER)
    except (TypeError, ValueError, OverflowError, RecursionError):  # the script may put anything into a group
        return encode_msgpack([(str(name), describe_type(value)) for name, value in items], encoder=ENCODER)


def describe_value(value: Any) -> Any:
    """Return what is compared of a value that is not plain data: never an address or a device's number."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.numel() <= MAX_ELEMENTS and value.layout is torch.strided:
            return value.tolist()
        # Reading it would wait for the GPU. PyTorch counts its changes.
        return f"{value.dtype} {list(value.shape)} on {value.device.type}, changed {value._version} times"
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, complex | torch.dtype):
        return str(value)
    return describe_type(value)


def describe_type(value: Any) -> Any:
    """Return a number or text as it is, and the type of anything else."""
    return value if isinstance(value, bool | float | str | type(None)) else type(value).__qualname__


ENCODER = msgspec.msgpack.Encoder(enc_hook=describe_value, order="deterministic")


def decode_hyperparameters(data: bytes) -> dict[Hyperparameter, Any]:
    """Return the settings by group and name."""
    found: dict[Hyperparameter, Any] = {}
    group = -1
    for name, value in msgspec.msgpack.decode(data) if data else ():
        group += name == "params"
        found[group, name] = value
    return found


def find_changes(before: bytes, after: bytes) -> list[Any]:
    """Return the changed settings as [group, name, value], and those that are gone as [group, name]."""
    if before == after:
        return []
    old, new = decode_hyperparameters(before), decode_hyperparameters(after)
    changed = [[*key, value] for key, value in new.items() if key not in old or old[key] != value]
    return changed + [list(key) for key in old if key not in new]


def encode_changes(settings: Sequence[list[Any]], states: Sequence[list[StateChange] | None]) -> bytes:
    """Return the changes of all optimizers as bytes, or an encoded None if they are too long to be posted."""
    shortened = [None if changes is None else changes[:MAX_STATE_ENTRIES] for changes in states]
    data = encode_msgpack(list(zip(settings, shortened, strict=True)), encoder=ENCODER)
    return data if len(data) <= MAX_DETAILS_BYTES else encode_msgpack(None, encoder=ENCODER)


def describe_hyperparameters(before: bytes, changes: Mapping[int, Sequence[Any]]) -> list[str]:
    """Return a text for each setting that differs between ranks, with the values of all ranks."""
    common = decode_hyperparameters(before)
    tables: dict[int, dict[Hyperparameter, Any]] = {}
    for rank, changed in changes.items():
        tables[rank] = dict(common)
        for group, name, *value in changed:
            if value:
                tables[rank][group, name] = value[0]
            else:
                tables[rank].pop((group, name), None)
    touched = dict.fromkeys((item[0], item[1]) for changed in changes.values() for item in changed)
    found = []
    for group, name in touched:
        by_value: dict[str, list[int]] = {}
        for rank, table in tables.items():
            value = repr(table[group, name]) if (group, name) in table else "absent"
            by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in by_value.items())
            title = "number of parameters" if name == "params" else name
            found.append(f"{title} of param group {group} is {values}")
    return found


def checksum(entry: StateEntry, *, reads_contents: bool) -> int:
    """Return a checksum of a value: of its contents, or only of its kind."""
    value = entry.value
    if not isinstance(value, Tensor):
        return zlib.crc32(str(describe_type(value)).encode()) if not isinstance(value, int) else value & 0xFFFFFFFF
    kind = zlib.crc32(f"{value.dtype} {list(value.shape)}".encode())
    if not reads_contents or value.layout is not torch.strided or value.is_meta:
        return kind
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.data, kind)


def shorten(texts: Sequence[str], separator: str = "; ") -> str:
    """Return the first few of some texts, and the number of the others."""
    more = len(texts) - SHOWN
    return separator.join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
