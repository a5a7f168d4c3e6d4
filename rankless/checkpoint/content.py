"""The content of a checkpoint: the state of all objects, extra data, and the random number generators of all ranks.

Note [rows of a save]: each worker asks its objects for their state, and in the layout "whole" the first one writes
what it has of it. Rows may be far away, on servers, which would send all of them to each worker. So objects leave them
out where another worker saves them.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from rankless.checkpoint.incremental_row_files import KeyedRows, find_keyed_rows
from rankless.checkpoint.manifest import Node
from rankless.checkpoint.state_tree import DetachedWithoutGather, TreeWriter
from rankless.deferred_models.build_and_materialize import materialize
from rankless.errors import CheckpointError
from rankless.ownership.partitioned_tensor import Partition, find_partition, list_partitions

_ARE_LEFT_OUT: ContextVar[bool] = ContextVar("are_left_out", default=False)


@contextlib.contextmanager
def leave_out_rows(*, applies: bool) -> Iterator[None]:
    """Within the context, `state_dict()` may leave out rows by ids: another worker saves them.

    Args:
        applies: Whether it does so.
    """
    token = _ARE_LEFT_OUT.set(applies)
    try:
        yield
    finally:
        _ARE_LEFT_OUT.reset(token)


def are_rows_left_out() -> bool:
    """Return whether another worker saves rows by ids."""
    return _ARE_LEFT_OUT.get()


EXTRA = "extra"
RANDOM = "random"
"""Names of the checkpoint's own parts, which no object may have."""


@dataclass(kw_only=True)
class Content:
    """A checkpoint as trees of nodes, and the tensors that they refer to, not copied and not gathered."""

    objects: dict[str, Node]
    shared_tensors: dict[str, Tensor]
    """The tensors of all objects, and the divided ones of the extra data: all ranks have them, or pieces of them."""
    keyed_rows: list[KeyedRows]
    """Which of these rank 0 writes as rows by ids, into files of their own."""
    extra: Node
    extra_tensors: dict[str, Tensor]
    """The others of the extra data, which rank 0 writes."""

    @property
    def row_tensors(self) -> dict[str, Tensor]:
        """The tensors of `keyed_rows`."""
        return {name: self.shared_tensors[name] for rows in self.keyed_rows for name in rows.tensors}

    def describe(self, *, all_tensors: bool) -> str:
        """Return a text that is equal on ranks whose objects hold tensors of equal names, shapes, dtypes and divisions.

        Args:
            all_tensors: Whether it covers all tensors, or only those that are divided between ranks.
        """
        partitions = {name: list_partitions(tensor) for name, tensor in self.shared_tensors.items()}
        lines = [
            f"{name} {tensor.dtype} {tuple(tensor.shape)} {describe_division(partitions[name])}"
            for name, tensor in self.shared_tensors.items()
            if all_tensors or partitions[name]
        ]
        lines += [f"rows of {rows.ids}" for rows in self.keyed_rows if all_tensors]
        checksum = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        divided = sum(map(bool, partitions.values()))
        counts = f"{len(lines) - len(self.keyed_rows)} tensors of " * all_tensors + (
            ", ".join(self.objects) or "no object"
        )
        return f"{counts}, {divided} of them divided (names, shapes and divisions: {checksum[:12]})"


def describe_division(partitions: Sequence[Partition]) -> str:
    """Return a text that is equal for tensors that are divided in the same way.

    Args:
        partitions: How one axis after the other divides a tensor. How long pieces of pieces are depends on the rank.
            Only the worker that owns an optimizer's state knows how it is divided further.
    """
    if not partitions:
        return "whole"
    placements = [partition.layout.placement for partition in partitions]
    owned = [number for number, item in enumerate(placements) if len(list(filter(None, item.lengths))) == 1]
    dims = [item.dim for item in placements[: owned[0] + 1 if owned else None]]
    return f"dims {dims}, first as {partitions[0].layout.placement!r}"


def gather_content(objects: Mapping[str, Any], extra: object) -> Content:
    """Return the state of the objects. Raises `CheckpointError`, which names what cannot be saved."""
    materialize(item for item in objects.values() if isinstance(item, nn.Module))
    writer, extra_writer = TreeWriter(), TreeWriter()
    with DetachedWithoutGather():
        nodes = {name: writer.encode(_state(name, subject), (name,)) for name, subject in objects.items()}
        extra_node = extra_writer.encode(extra, (EXTRA,))
    divided = {name: tensor for name, tensor in extra_writer.tensors.items() if find_partition(tensor) is not None}
    return Content(
        objects=nodes,
        shared_tensors=writer.tensors | divided,
        keyed_rows=find_keyed_rows(nodes.values(), writer.tensors),
        extra=extra_node,
        extra_tensors={name: tensor for name, tensor in extra_writer.tensors.items() if name not in divided},
    )


def pack_random_state(device: torch.device, *, rank: int) -> bytes:
    """Return this process's random state under the names of rank `rank`, as bytes for rank 0."""
    writer = TreeWriter()
    node = writer.encode(capture_random_state(device), (RANDOM, str(rank)))
    return msgspec.msgpack.encode((node, safetensors.torch.save(writer.tensors)))


def unpack_random_state(data: bytes) -> tuple[Node, dict[str, Tensor]]:
    """Return the node of bytes that `pack_random_state` made, and copies of its tensors."""
    node, tensors = msgspec.msgpack.decode(data, type=tuple[Node, bytes])
    return node, safetensors.torch.load(tensors)


def _state(name: str, subject: Any) -> object:
    if name.partition(".")[0] in (RANDOM, EXTRA, ""):
        raise CheckpointError(
            expected=f"a name that is not empty and not {RANDOM!r} or {EXTRA!r}, which the checkpoint itself uses",
            found=f"an object named {name!r}",
            fix="give it another name",
        )
    if not callable(getattr(subject, "state_dict", None)):
        raise CheckpointError(
            expected=f"{name} to have state_dict() and load_state_dict()",
            found=f"a {type(subject).__name__} without state_dict",
            fix=f"pass an object that has them, several as arguments of their own: {name}_1=…, {name}_2=…; plain "
            f"values go into extra={{{name!r}: …}}",
        )
    return subject.state_dict()


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's default generators, and of GPUs if CUDA is in use.

    `device` is the process's own, whose generator comes first under "cuda". A process without an own GPU adds those of
    all GPUs in their order.
    """
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": dict(np.random.get_state(legacy=False)),
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss_next": gauss_next},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state(number) for number in _list_own_devices(device)]
    return state


def select_rank_state(states: list[Node], rank: int) -> Node:
    """Return the saved state of a rank, or that of rank 0 if the rank has none."""
    return states[rank] if rank < len(states) else states[0]


def restore_random_state(state: Any, device: torch.device) -> None:
    """Set the generators to a state of `capture_random_state`, as far as both have the same GPUs.

    If it raises `CheckpointError`, the generators of the CPU are as they were.
    """
    before = capture_random_state(device)
    try:
        _restore(state, device)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        _restore(before, device)
        raise CheckpointError(
            expected="a random state that this Python, numpy and torch understand",
            found=f"{type(error).__name__}: {error}",
            fix="load with random=False, and seed the generators yourself",
        ) from error


def _restore(state: Any, device: torch.device) -> None:
    python = state["python"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss_next"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for number, cuda_state in zip(_list_own_devices(device), state.get("cuda", []), strict=False):
            torch.cuda.set_rng_state(cuda_state, number)


def _list_own_devices(device: torch.device) -> list[int]:
    """Return the numbers of the GPUs that this process may use: its own, or all if it has none of its own."""
    if device.type == "cuda" and device.index is not None:
        return [device.index]
    first = torch.cuda.current_device()
    return [first, *(number for number in range(torch.cuda.device_count()) if number != first)]
