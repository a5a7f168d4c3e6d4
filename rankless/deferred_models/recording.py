"""The operators that made deferred tensors, and the computation of their values from them.

Note [deferred values]: a deferred tensor has a number, and a tensor on PyTorch's meta device with its shape, strides
and storage. An operation of the recording names its arguments and results by numbers. The value of a tensor comes from
the operations that made it and those that changed its storage, run again in their order. Random operators also ran
when they were recorded, on memory that was freed at once: later draws of the script depend on the generator's state.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils import _pytree as pytree

OVERWRITING = ("uniform_", "normal_", "zero_", "fill_", "copy_", "exponential_", "random_", "log_normal_", "cauchy_")
"""Operators that change all elements of their first argument, whatever these were."""
Draw = Callable[[Tensor, Mapping[str, Any], torch.Generator], Tensor]
DRAWN_BY: dict[str, Draw] = {
    "rand": lambda memory, _, generator: memory.uniform_(0, 1, generator=generator),
    "randn": lambda memory, _, generator: memory.normal_(0, 1, generator=generator),
    "randint": lambda memory, given, generator: memory.random_(given.get("low", 0), given["high"], generator=generator),
}
"""How PyTorch draws the numbers of operators that make a random tensor, and of those that end in "_like"."""

GeneratorState = tuple[torch.Generator, Tensor]


@dataclass(frozen=True)
class Reference:
    """An argument of an operation that is a deferred tensor, by its number."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operator with its arguments, in which deferred tensors are references."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    """The numbers of the tensors among the flattened results; None for one that is no tensor, or not new."""
    storages: frozenset[int]
    """The storages that it changes."""
    overwrites: bool
    """Whether it changes all elements of them."""
    generator: GeneratorState | None
    """The generator from which it draws, with its state before."""

    def inputs(self) -> Iterator[int]:
        """Yield the numbers of the deferred tensors among the arguments."""
        for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))):
            if isinstance(leaf, Reference):
                yield leaf.number


@dataclass(eq=False)
class OperatorRecording:
    """All operations of one model, or of several that were built together."""

    operations: list[Operation] = field(default_factory=list)
    shapes: list[Tensor] = field(default_factory=list)
    """For each number the tensor on the meta device. They stay alive, so that storages keep their identity."""
    _makers: dict[int, int] = field(default_factory=dict)
    """For each number the operation that made it."""
    alive: "weakref.WeakValueDictionary[int, Any]" = field(default_factory=weakref.WeakValueDictionary)
    """For each number the deferred tensor, while the script holds it."""
    _lent: dict[torch.device, Tensor] = field(default_factory=dict)
    _changes: dict[int, list[int]] = field(default_factory=dict)
    """For each storage the operations that changed it, in order."""

    def add_tensor(self, shape: Tensor) -> int:
        """Return the number of a new tensor that lies in memory as `shape`, which is on the meta device."""
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def storage(self, number: int) -> int:
        """Return the identity of the memory of a tensor."""
        return find_storage(self.shapes[number])

    def add_operation(self, operation: Operation) -> None:
        """Append an operation."""
        place = len(self.operations)
        self.operations.append(operation)
        for number in operation.results:
            if number is not None:
                self._makers[number] = place
        for storage in operation.storages:
            self._changes.setdefault(storage, []).append(place)

    def lend_memory(self, shape: Tensor, device: torch.device) -> Tensor:
        """Return memory in the shape of a tensor, for random numbers that nobody reads. The next call uses it again.

        New memory for each tensor would stay with the process, between the generators' states that are kept.
        """
        size = 1 + sum((extent - 1) * stride for extent, stride in zip(shape.shape, shape.stride(), strict=True))
        needed = max(1, size) * shape.element_size()
        lent = self._lent.get(device)
        if lent is None or lent.numel() < needed:
            lent = self._lent[device] = torch.empty(needed, dtype=torch.uint8, device=device)
        return lent[:needed].view(shape.dtype).as_strided(shape.shape, shape.stride())

    def release_memory(self) -> None:
        """Free the memory that was lent."""
        self._lent.clear()

    def covers_storage(self, number: int) -> bool:
        """Return whether a tensor has all elements of its storage."""
        shape = self.shapes[number]
        is_dense = is_non_overlapping_and_dense_or_false(shape)
        return is_dense and shape.numel() * shape.element_size() == shape.untyped_storage().nbytes()

    def evaluate(self, numbers: Sequence[int]) -> list[Tensor]:
        """Compute the values of tensors as the recorded operators would have, without a trace in the generators."""
        places = self.find_operations(numbers)
        last_use = {
            number: place
            for place in places
            for number in (*self.operations[place].inputs(), *present(self.operations[place].results))
        }
        values: dict[int, Tensor] = {}
        with torch.no_grad():
            for place in places:
                operation = self.operations[place]
                results = run_operation(operation, values)
                for number, value in zip(operation.results, results, strict=True):
                    if number is not None:
                        values[number] = value
                for number in {*operation.inputs(), *present(operation.results)}:
                    if last_use[number] == place and number not in numbers:
                        del values[number]
        return [values[number] for number in numbers]

    def find_operations(self, numbers: Iterable[int]) -> list[int]:
        """Return the places of the operations on which the values of tensors depend, in order."""
        found: set[int] = set()
        needed = [(number, len(self.operations)) for number in numbers]
        while needed:
            number, before = needed.pop()
            for place in (self._makers[number], *self._find_changes(self.storage(number), before)):
                if place not in found:
                    found.add(place)
                    needed += [(argument, place) for argument in self.operations[place].inputs()]
        return sorted(found)

    def _find_changes(self, storage: int, before: int) -> Iterator[int]:
        """Yield the changes of a storage before an operation, from the last to one that changed all of it."""
        for place in reversed(self._changes.get(storage, [])):
            if place < before:
                yield place
                if self.operations[place].overwrites:
                    return


def find_storage(shape: Tensor) -> int:
    """Return the identity of the storage of a tensor on the meta device."""
    return int(shape.untyped_storage()._cdata)


def present(numbers: Iterable[int | None]) -> Iterator[int]:
    """Yield the numbers that are not None."""
    return (number for number in numbers if number is not None)


def run_operation(operation: Operation, values: Mapping[int, Tensor]) -> list[Any]:
    """Run an operation on values, and return its flattened results. It draws what it drew when it was recorded."""
    args, kwargs = pytree.tree_map_only(
        Reference, lambda item: values[item.number], (operation.args, dict(operation.kwargs))
    )
    if operation.generator is None:
        return pytree.tree_leaves(operation.operator(*args, **kwargs))
    generator, state = operation.generator
    return with_state(generator, state, lambda: pytree.tree_leaves(operation.operator(*args, **kwargs)))


def with_state(generator: torch.Generator, state: Tensor, function: Callable[[], list[Any]]) -> list[Any]:
    """Call a function while a generator has a state, and restore the state after it."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        return function()
    finally:
        generator.set_state(before)
