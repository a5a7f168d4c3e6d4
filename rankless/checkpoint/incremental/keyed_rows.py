"""Finds tensors that have a row for each of some ids, in the states of objects: those of tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankless.checkpoint.incremental.stored_rows import is_rising
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest import Node, TensorReference
from rankless.checkpoint.manifest import Sequence as SequenceNode
from rankless.ownership.partitioned_tensor import find_partition

LEAST_BYTES = 1 << 20
"""Smaller ones are written with all other tensors."""
_COLUMNS = {"ids": ("rows", "used_steps"), "waiting_ids": ("waiting_occurrences", "waiting_steps")}
"""The keys of a table's state (`parameter_server.tables.contents`): those of ids, and of what has a row for each."""


class KeyedRows(NamedTuple):
    """The names of a tensor of ids, and of the tensors that have a row for each."""

    ids: str
    columns: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """All names."""
        return (self.ids, *self.columns)


def find_keyed_rows(nodes: Iterable[Node], tensors: Mapping[str, Tensor]) -> list[KeyedRows]:
    """Return the tensors that are to be written in layers of rows.

    Any mapping with these keys, rising ids and as many rows is read back as it was, whoever has made it.

    Args:
        nodes: The states of objects.
        tensors: Their tensors, by name.
    """
    found: list[KeyedRows] = []
    for node in nodes:
        for mapping in _list_mappings(node):
            for key, columns in _COLUMNS.items():
                names = [_name_of(mapping.get(each)) for each in (key, *columns)]
                group = KeyedRows(names[0], tuple(names[1:]))
                taken = {name for each in found for name in each.tensors}
                if len(set(names) - taken) == len(names) and _are_rows([tensors.get(name) for name in names]):
                    found.append(group)
    return found


def _list_mappings(node: Node) -> Iterator[dict[int | str, Node]]:
    if isinstance(node, SequenceNode):
        for item in node.items:
            yield from _list_mappings(item)
    elif isinstance(node, MappingNode):
        yield dict(node.items)
        for _, item in node.items:
            yield from _list_mappings(item)


def _name_of(node: Node) -> str:
    return node.name if isinstance(node, TensorReference) else ""


def _are_rows(tensors: Sequence[Tensor | None]) -> bool:
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(tensors) or any(find_partition(tensor) is not None for tensor in found):
        return False
    ids = found[0]
    return (
        ids.dtype == torch.int64
        and ids.dim() == 1
        and all(tensor.dim() > 0 and len(tensor) == len(ids) for tensor in found)
        and sum(tensor.nbytes for tensor in found) >= LEAST_BYTES
        and is_rising(ids.cpu().numpy())
    )
