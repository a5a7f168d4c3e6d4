"""Which tensors of a checkpoint an export has, under which names, and where their elements are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankless.checkpoint.manifest import Manifest, Node, SparseReference, TensorReference
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest import Sequence as SequenceNode
from rankless.errors import CheckpointError

_TABLE_KEYS = {"ids", "rows", "used_steps", "optimizer", "seed"}
_EXTRA_STATE = "_extra_state."


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """A tensor of an export.

    Attributes:
        name: Its name there.
        source: The name of the checkpoint's tensor.
        dtype: Its dtype.
        shape: Its shape.
        columns: Which elements of each row it has, along the second dim. None: all.
    """

    name: str
    source: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: slice | None = None

    @property
    def empty(self) -> Tensor:
        """A tensor without elements of the same dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def select(self, rows: Tensor) -> Tensor:
        """Return what it has of rows of its source."""
        return rows if self.columns is None else rows[:, self.columns]


class ExportContent(NamedTuple):
    """What an export has, and the names of the objects that it leaves out."""

    tensors: list[ExportedTensor]
    references: list[TensorReference]
    left_out: list[str]


@dataclass(frozen=True, kw_only=True)
class ExportChoice:
    """What to export of a checkpoint.

    Attributes:
        objects: Names of saved objects. None: all modules.
        with_states: Whether states of optimizers are exported, those of modules' and those of tables.
        state_counts: By the name of a table's optimizer, how many states as long as its values a row has.
    """

    objects: Sequence[str] | None = None
    with_states: bool = False
    state_counts: Mapping[str, int]


def list_exported(manifest: Manifest, choice: ExportChoice) -> ExportContent:
    """Return what an export of a checkpoint has. Raises CheckpointError if that is nothing, or objects are unknown."""
    chosen = _choose_objects(manifest, choice)
    found = [pair for name in chosen for pair in _list_tensors(manifest.objects[name], choice)]
    references = {reference.name: reference for _, reference in found}
    tensors: dict[str, ExportedTensor] = {}
    # Tables come last: only they have other names than in the checkpoint, which a module's own tensors may have too.
    for tensor, _ in sorted(found, key=lambda pair: pair[0].name != pair[0].source):
        known = tensors.setdefault(tensor.name, tensor)
        if known != tensor:
            other = f"{tensor.source}.{tensor.name.rpartition('.')[2]}"
            tensors[other] = replace(tensor, name=other)
    left_out = [name for name in manifest.objects if name not in chosen]
    if not tensors:
        raise CheckpointError(
            expected="a checkpoint with a module's tensors",
            found=f"none in {', '.join(chosen) or 'it'}; the objects are {', '.join(manifest.objects) or 'none'}",
            fix="name objects that have tensors with --objects",
        )
    return ExportContent(list(tensors.values()), list(references.values()), left_out)


def _choose_objects(manifest: Manifest, choice: ExportChoice) -> list[str]:
    if choice.objects is not None:
        unknown = [name for name in choice.objects if name not in manifest.objects]
        if unknown:
            raise CheckpointError(
                expected=f"names of saved objects: {', '.join(manifest.objects) or 'none'}",
                found=", ".join(unknown),
                fix="choose among these in --objects",
            )
        return list(choice.objects)
    return [
        name
        for name, node in manifest.objects.items()
        if _is_module(node) or (choice.with_states and _is_optimizer(node))
    ]


def _is_module(node: Node) -> bool:
    """Return whether a node is the state of a module: PyTorch gives it an ordered dict with metadata."""
    return isinstance(node, MappingNode) and node.type == "ordered" and node.metadata is not None


def _is_optimizer(node: Node) -> bool:
    return isinstance(node, MappingNode) and {"state", "param_groups"} <= set(dict(node.items))


def _list_tensors(node: Node, choice: ExportChoice) -> Iterator[tuple[ExportedTensor, TensorReference]]:
    if isinstance(node, TensorReference):
        yield _whole(node, node.name), node
    elif isinstance(node, SparseReference):
        for part in (node.indices, node.values):
            yield _whole(part, part.name), part
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _list_tensors(item, choice)
    elif isinstance(node, MappingNode):
        values = dict(node.items)
        if set(values) >= _TABLE_KEYS:
            yield from _list_table(values, choice)
            return
        stand_ins = {f"{str(key).removesuffix('_extra_state')}weight" for key, item in node.items if _is_table(item)}
        for key, item in node.items:
            if key not in stand_ins:
                yield from _list_tensors(item, choice)


def _is_table(node: Node) -> bool:
    return isinstance(node, MappingNode) and set(dict(node.items)) >= _TABLE_KEYS


def _list_table(values: Mapping[Any, Node], choice: ExportChoice) -> Iterator[tuple[ExportedTensor, TensorReference]]:
    """Yield the ids, the values and, if they are wanted, the optimizer's states of a table."""
    ids, rows, optimizer = values["ids"], values["rows"], values["optimizer"]
    states = choice.state_counts.get(str(optimizer))
    if not isinstance(ids, TensorReference) or not isinstance(rows, TensorReference) or len(rows.shape) != 2:
        raise CheckpointError(
            expected="a table's ids and rows", found="other values", fix="the checkpoint is damaged: export another one"
        )
    if states is None or rows.shape[1] % (1 + states):
        raise CheckpointError(
            expected=f"a table's rows with the states of one of {', '.join(filter(None, choice.state_counts))}",
            found=f"{optimizer!r} and rows of {rows.shape[1]} elements, in {rows.name}",
            fix="export with the version of Rankless that wrote the checkpoint",
        )
    prefix = ids.name.removesuffix("ids").removesuffix(_EXTRA_STATE)
    dim = rows.shape[1] // (1 + states)
    yield _whole(ids, f"{prefix}ids"), ids
    yield _columns(rows, f"{prefix}rows", 0, dim), rows
    if choice.with_states and states:
        yield _columns(rows, f"{prefix}states", dim, rows.shape[1]), rows


def _whole(reference: TensorReference, name: str) -> ExportedTensor:
    dtype: torch.dtype = getattr(torch, reference.dtype)
    return ExportedTensor(name=name, source=reference.name, dtype=dtype, shape=reference.shape)


def _columns(reference: TensorReference, name: str, start: int, stop: int) -> ExportedTensor:
    dtype: torch.dtype = getattr(torch, reference.dtype)
    shape = (reference.shape[0], stop - start)
    return ExportedTensor(name=name, source=reference.name, dtype=dtype, shape=shape, columns=slice(start, stop))
