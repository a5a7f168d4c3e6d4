"""Which values each part of a pipeline needs from other parts, and which of them move between workers.

Note [sums of several workers]: where several workers compute a stage, each has the sum over its own microbatches of a
value, such as a gradient. After its units it sends that to the workers that need the sum over all. They add the terms
in the order of workers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

import torch
from torch import Tensor, fx

from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order, find_repeated_dims
from rankless.compiler.pipeline_parallel.microbatch_lowering import is_join
from rankless.compiler.pipeline_parallel.node_phases import Phase, ProgramPartition, list_ancestors
from rankless.compiler.pipeline_parallel.schedules import UNIT_KINDS, StageWorkers, Unit
from rankless.compiler.pipeline_parallel.stage_value_streams import TransferredValue
from rankless.compiler.selected_rows.local_counts import SizeFromCounts
from rankless.compiler.tracing.symbolic_sizes import list_traced_counts, size_hint

NUMBERS = (torch.ops.aten.sym_size.int, local_kernels.count_places, Tensor.tolist, sum)
"""Functions of local programs that give numbers of selected rows."""


class ValueKey(NamedTuple):
    """A value of a step: a tuple, because a step looks up each of its values by key several times.

    Attributes:
        name (str): The node that computes it.
        microbatch (int | None): For which microbatch; None if it is the same for all.
        is_sum (bool): Whether it is the sum over all microbatches.
    """

    name: str
    microbatch: int | None = None
    is_sum: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a step: the units of a stage, or what a worker does before or after all units."""

    phase: Phase
    number: int
    """The stage of a forward or backward unit, else the worker."""

    @staticmethod
    def of(unit: Unit) -> "Part":
        """Return the part to which a unit belongs, with those of the other microbatches."""
        return Part(unit.kind, unit.stage)


@dataclass(frozen=True)
class Need:
    """A value that a part of the step takes from another one: of each microbatch, or the sum over all."""

    name: str
    is_sum: bool = False


class InputHolders(NamedTuple):
    """The workers that have inputs of a program, by the names of their nodes.

    Args:
        held: Those that every worker has.
        owners: The worker of each other one.
        copies: The workers with copies of it; see Note [copies of shards].
    """

    held: frozenset[str]
    owners: Mapping[str, int]
    copies: Mapping[str, Sequence[int]]


class DataFlow:
    """The values that parts of a step take from each other.

    Args:
        holders: The workers that have inputs.
        outputs: For each output of the program the workers that compute it.
    """

    def __init__(
        self,
        partition: ProgramPartition,
        stage_workers: StageWorkers,
        holders: InputHolders,
        outputs: Sequence[Sequence[int]],
    ) -> None:
        self.partition = partition
        self.stage_workers = stage_workers
        self._holders = holders
        self._free_joins: dict[str, tuple[str, ...]] = {}
        self._order = {node.name: position for position, node in enumerate(partition.nodes)}
        self.needs: dict[Part, dict[Need, None]] = {}
        for node in partition.nodes:
            if partition.phases[node.name] not in ("input", "free"):
                self._add_needs(self.find_part(node.name), node.all_input_nodes, node)
        for (node, _), workers in zip(partition.graphs[0].outputs, outputs, strict=True):
            for worker in workers:
                self._add_needs(Part("finish", worker), [node], None)

    def find_worker(self, name: str, microbatch: int | None = None) -> int:
        """Return the worker that computes a value, or has it as an input.

        Args:
            name: The value.
            microbatch: For which microbatch, where units compute it.
        """
        stage = self.partition.stages[name]
        if self.partition.phases[name] in UNIT_KINDS:
            assert microbatch is not None, f"{name} is computed for each microbatch"
            return self.stage_workers.find_worker(stage, microbatch)
        return self._holders.owners.get(name, self.stage_workers.find_first(stage))

    def list_sum_workers(self, name: str) -> list[int]:
        """Return the workers that have terms of a sum over microbatches; see Note [sums of several workers]."""
        return self.stage_workers.list_busy(self.partition.stages[name], len(self.partition.graphs))

    def find_part(self, name: str) -> Part:
        """Return the part of the step that computes a value."""
        phase = self.partition.phases[name]
        return Part(phase, self.partition.stages[name] if phase in UNIT_KINDS else self.find_worker(name))

    def _add_needs(self, part: Part, values: Iterable[fx.Node], user: fx.Node | None) -> None:
        """Note what a node of a part takes from others; without a user it is an output of the program."""
        needs = self.needs.setdefault(part, {})
        for value in values:
            phase = self.partition.phases[value.name]
            if phase == "free":
                needs.update(dict.fromkeys(map(Need, self.list_free_joins(value.name))))
                continue
            partition = self.partition
            takes_sum = partition.is_partial(value) if user is None else partition.takes_sum_of(user, value)
            is_sum = phase in UNIT_KINDS and takes_sum
            if is_sum or self.find_part(value.name) != part:
                needs[Need(value.name, is_sum)] = None

    def list_free_joins(self, name: str) -> tuple[str, ...]:
        """Return the joins that a free value needs first: each worker computes them before all units."""
        if name not in self._free_joins:
            node = self.partition.by_name[name]
            inner = [join for item in node.all_input_nodes for join in self.list_free_joins(item.name)]
            self._free_joins[name] = (name,) if is_join(node) else tuple(dict.fromkeys(inner))
        return self._free_joins[name]

    def _takes_part(self, worker: int, part: Part, microbatch: int | None) -> bool:
        """Return whether a worker runs a part of the step, for a microbatch if one is given."""
        if part.phase not in UNIT_KINDS:
            return part.number == worker
        if microbatch is None:
            return worker in self.stage_workers.of[part.number]
        return worker == self.stage_workers.find_worker(part.number, microbatch)

    def is_remote(self, name: str, worker: int, microbatch: int | None = None) -> bool:
        """Return whether a value comes from another worker, for a microbatch where units compute it."""
        holders = self._holders
        if self.partition.phases[name] == "free" or name in holders.held or worker in holders.copies.get(name, ()):
            return False
        return self.find_worker(name, microbatch) != worker

    def list_needed(self, worker: int, source: Part, microbatch: int | None = None) -> list[Need]:
        """Return what a worker needs of a part of the step, its own or another worker's, in program order."""
        found = {
            need: None
            for part, needs in self.needs.items()
            if part != source and self._takes_part(worker, part, microbatch)
            for need in needs
            if self._comes_from(need, source)
        }
        return sorted(found, key=lambda need: (self._order[need.name], need.is_sum))

    def _comes_from(self, need: Need, source: Part) -> bool:
        phase = self.partition.phases[need.name]
        if phase == "free":
            return source.phase == "prepare"
        if need.is_sum:
            return source.phase == "finish" and source.number in self.list_sum_workers(need.name)
        if phase == "input":
            return source == Part("prepare", self.find_worker(need.name))
        return source == self.find_part(need.name)

    def list_sent(self, source: Part, target: int, microbatch: int | None = None) -> list[Need]:
        """Return what a part of the step sends to a worker, in order: sums first, else in program order."""
        if self._takes_part(target, source, microbatch):
            return []
        needed = self.list_needed(target, source, microbatch)
        sent = [need for need in needed if need.is_sum or self.is_remote(need.name, target, microbatch)]
        return sorted(sent, key=lambda need: not need.is_sum)

    def list_keys(self, need: Need) -> list[ValueKey]:
        """Return the values of a step that a need stands for."""
        if need.is_sum or self.is_single(need.name):
            return [ValueKey(need.name, is_sum=need.is_sum)]
        return [ValueKey(need.name, number) for number in range(len(self.partition.graphs))]

    def is_single(self, name: str) -> bool:
        """Return whether a value exists once, and not for each microbatch."""
        partition = self.partition
        is_unit = partition.phases[name] in UNIT_KINDS
        return not is_unit and (partition.is_invariant[name] or partition.is_summed[name])

    def list_stream(self, source: int, target: int, units: Sequence[Unit]) -> list[TransferredValue]:
        """Return all that a worker sends to another before its outputs, in order."""
        keys = [key for need in self.list_sent(Part("prepare", source), target) for key in self.list_keys(need)]
        for unit in units:
            sent = self.list_sent(Part.of(unit), target, unit.microbatch)
            keys += [ValueKey(need.name, unit.microbatch) for need in sent]
        keys += [key for need in self.list_sent(Part("finish", source), target) for key in self.list_keys(need)]
        return [self.describe(key) for key in keys]

    def describe(self, key: ValueKey) -> TransferredValue:
        """Return the shape and memory of a value, for a worker that receives it."""
        value = self.partition.by_name[key.name]
        if "value" not in value.meta:
            if not gives_number(value):
                return TransferredValue(key, (), torch.int64, find_device(value), has_header=True)
            shape = (None,) if value.target is Tensor.tolist else ()
            return TransferredValue(key, shape, torch.int64, find_device(value), is_number=True)
        logical: LogicalValue = value.meta["value"][0].meta["val"]
        return describe_tensor(key, logical, self.partition.compute_shape(value, key.microbatch or 0))


def gives_number(node: fx.Node) -> bool:
    """Return whether a local node gives a number of selected rows, a size that depends on such, or a list of them."""
    target = node.target
    if target is getitem:
        return gives_number(node.all_input_nodes[0])
    return target in NUMBERS or isinstance(target, SizeFromCounts)


def find_device(node: fx.Node) -> torch.device:
    """Return the device of the nearest tensor from which a number is computed."""
    tensor = next(item for item in reversed(list_ancestors(node)) if "value" in item.meta)
    device: torch.device = tensor.meta["value"][0].meta["val"].device
    return device


def describe_tensor(key: object, logical: LogicalValue, shape: Sequence[int]) -> TransferredValue:
    """Return what a worker must know of a tensor to receive it: its order in memory is the logical value's."""
    if logical.is_sparse:
        return TransferredValue(key, tuple(shape), logical.dtype, logical.device, has_header=True)
    sizes, strides = ([int(size_hint(item)) for item in items] for items in (logical.shape, logical.strides))
    repeated = find_repeated_dims(sizes, strides)
    order = find_memory_order([1 if dim in repeated else size for dim, size in enumerate(sizes)], strides)
    known = tuple(None if list_traced_counts(size) else int(size) for size in shape)
    return TransferredValue(key, known, logical.dtype, logical.device, order, repeated)
