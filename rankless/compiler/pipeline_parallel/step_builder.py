"""Build one worker's part of a program in a pipeline.

Note [gathers in stages]: with zero="parameters" a worker has a piece of each parameter of its stage. The first part of
its step that uses a parameter gathers it, and returns the whole to those after it, in place of the piece. The whole is
freed after the last part that uses it. So a step sends each parameter once, whatever the number of microbatches, as
FSDP does that keeps parameters between forward and backward. Workers along the axis `data` run the same parts in the
same order, so they gather the same groups. A parameter that another stage uses too is sent there as a whole.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, fx

from rankless.compiler.ir.custom_ops import run_linear_weight
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramOutput, is_fresh
from rankless.compiler.local_program import generate_function
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.lowering.value_check import ValueCheck
from rankless.compiler.pipeline_parallel.data_flow import (
    DataFlow,
    InputHolders,
    Need,
    Part,
    ValueKey,
    describe_tensor,
)
from rankless.compiler.pipeline_parallel.microbatch_lowering import MICROBATCH, ArgumentExchange
from rankless.compiler.pipeline_parallel.node_phases import ProgramPartition
from rankless.compiler.pipeline_parallel.part_graphs import ADDING_VARIANTS, PartGraph, add_terms, take_sum
from rankless.compiler.pipeline_parallel.random_draws import RandomDraws
from rankless.compiler.pipeline_parallel.schedules import UNIT_KINDS, Unit
from rankless.compiler.pipeline_parallel.stage_value_streams import TransferredValue
from rankless.compiler.pipeline_parallel.stages import PipelineOptions
from rankless.compiler.pipeline_parallel.step import PartFunction, PipelineStep, StepOutput
from rankless.compiler.scheduling.gradient_buckets import schedule_gradients
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage, limit_group
from rankless.compiler.scheduling.parameter_gathers import (
    GatheredValue,
    ParameterUse,
    add_gathers,
    count_bytes,
    group_values,
)
from rankless.compiler.sharding.redistribute import CollectiveRecord
from rankless.ownership.shard_layout import ShardLayout
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard


class StepBuilder:
    """Builds one worker's part of a step.

    Args:
        exchanges: The gathers of arguments before all units, by the number of the argument.
    """

    def __init__(
        self,
        partition: ProgramPartition,
        options: PipelineOptions,
        storage: StateStorage,
        exchanges: Mapping[int, ArgumentExchange],
    ) -> None:
        self._partition = partition
        self._options = options
        self._storage = storage
        self._exchanges = exchanges
        self._owned = storage.owned
        self._worker = options.axis.rank
        self._workers = options.axis.size
        self._stage_workers = options.stage_workers
        self.collectives: list[CollectiveRecord] = []
        self._returned = [self._list_output_workers(node, described) for node, described in partition.graphs[0].outputs]
        names = {local.name: described.name for local, described in partition.graphs[0].inputs}
        owners = {name: self._find_owner(known) for name, known in names.items() if known in self._owned}
        copies = {name: self._storage.copies.get(names[name], ()) for name in owners}
        holders = InputHolders(frozenset(names.keys() - owners.keys()), owners, copies)
        self.data_flow = DataFlow(partition, self._stage_workers, holders, self._returned)
        units = options.schedule.workers[self._worker]
        parts = [Part("prepare", self._worker), *map(Part.of, units), Part("finish", self._worker)]
        self._gathers = StageGathers(self.data_flow, self._worker, parts, storage)

    def _find_owner(self, name: str) -> int:
        """Return the worker that has a parameter which is divided along the axis."""
        owner = self._storage.find_owner(name)
        return self._stage_workers.find_first(self._options.stages.owners[name]) if owner is None else owner

    def _list_output_workers(self, node: fx.Node, described: ProgramOutput) -> tuple[int, ...]:
        """Return the workers that compute an output: that of a divided parameter has its gradient, as its copies do."""
        if described.kind == "gradient" and described.name in self._owned:
            return (self._find_owner(described.name), *self._storage.copies.get(described.name, ()))
        return (self._stage_workers.find_first(self._partition.stages.get(node.name, self._partition.count - 1)),)

    def build(self, mesh: Mesh) -> PipelineStep:
        """Return the step."""
        draws = RandomDraws(mesh.device)
        prepare = self._build_prepare(draws)
        units = [(unit, self._build_unit(unit, draws)) for unit in self._options.schedule.workers[self._worker]]
        finish = self._build_finish(draws)
        sends = {unit: tuple(self._list_sends(unit)) for unit, _ in units}
        sent = [[ValueKey(name, unit.microbatch) for name, *_ in sends[unit]] for unit, _ in units]
        taken = [prepare.inputs, *[function.inputs for _, function in units], finish.inputs, *sent]
        uses = Counter(key for keys in taken for key in keys)
        return PipelineStep(
            arguments=tuple(self._list_arguments()),
            exchanges=self._list_exchanges(uses),
            prepare=prepare,
            units=tuple(units),
            finish=finish,
            sends=sends,
            receives=self._list_receives([unit for unit, _ in units]),
            streams={
                source: tuple(self._list_stream(source)) for source in range(self._workers) if source != self._worker
            },
            uses=uses,
            outputs=tuple(self._describe_outputs()),
            shared=self._find_shared(),
            draws=draws,
            worker=self._worker,
            workers=self._workers,
        )

    def _find_shared(self) -> tuple[int, ...]:
        """Return the number of an input in each memory that workers share."""
        shared = self._storage.shared
        inputs = enumerate(described.name for _, described in self._partition.graphs[0].inputs)
        return tuple({shared[name]: number for number, name in inputs if name in shared}.values())

    def _list_arguments(self) -> Sequence[tuple[ValueKey, int, tuple[int, int, int] | None]]:
        """Return where the values of inputs come from."""
        found: list[tuple[ValueKey, int, tuple[int, int, int] | None]] = []
        for number, (local, described) in enumerate(self._partition.graphs[0].inputs):
            if self.data_flow.is_single(local.name):
                found.append((ValueKey(local.name), number, None))
                continue
            placement = self._options.batch_lengths[described.index]
            assert placement is not None
            for microbatch in range(self._options.microbatches):
                piece = self._find_piece(local.name, described.index, placement, microbatch)
                found.append((ValueKey(local.name, microbatch), number, piece))
        return found

    def _find_piece(self, name: str, index: int, rows: Shard, microbatch: int) -> tuple[int, int, int]:
        """Return dim, start and length of this worker's rows of a microbatch of an argument."""
        start, length = rows.start(microbatch), rows.lengths[microbatch]
        if index not in self._exchanges:
            return rows.dim, start, length
        axis, axes = self._exchanges[index].axis, self._partition.axes
        own = self._partition.copies[microbatch][name].meta["value"][1][axes.index(axis)]
        assert isinstance(own, Shard)
        return rows.dim, start + own.start(axis.rank), own.lengths[axis.rank]

    def _list_exchanges(self, uses: Mapping[ValueKey, int]) -> tuple[tuple[int, ArgumentExchange], ...]:
        """Return the gathers of arguments that this worker's stages take, with the numbers of their inputs."""
        used = {key.name for key in uses}
        found = [
            (number, self._exchanges[described.index])
            for number, (local, described) in enumerate(self._partition.graphs[0].inputs)
            if described.kind == "argument" and described.index in self._exchanges and local.name in used
        ]
        self.collectives = [*[exchange.record for _, exchange in found], *self.collectives]
        return tuple(found)

    def _list_sends(self, unit: Unit) -> Sequence[tuple[str, int, TransferredValue]]:
        """Return what a unit sends, to which worker, and its description."""
        return [
            (need.name, target, self.data_flow.describe(ValueKey(need.name, unit.microbatch)))
            for target in range(self._workers)
            for need in self.data_flow.list_sent(Part.of(unit), target, unit.microbatch)
        ]

    def _list_receives(self, units: Sequence[Unit]) -> Mapping[Unit | None, tuple[tuple[ValueKey, int], ...]]:
        """Return what each unit of this worker, and what comes after them, needs first of other workers' units."""
        known: set[ValueKey] = set()
        found: dict[Unit | None, tuple[tuple[ValueKey, int], ...]] = {}
        for unit in (*units, None):
            part = Part("finish", self._worker) if unit is None else Part.of(unit)
            numbers = range(self._options.microbatches) if unit is None else (unit.microbatch,)
            new = [
                (ValueKey(need.name, number), self.data_flow.find_worker(need.name, number))
                for need in self.data_flow.needs.get(part, ())
                for number in numbers
                if self._partition.phases[need.name] in UNIT_KINDS
                and not need.is_sum
                and self.data_flow.is_remote(need.name, self._worker, number)
                and ValueKey(need.name, number) not in known
            ]
            known.update(key for key, _ in new)
            found[unit] = tuple(new)
        return found

    def _list_stream(self, source: int) -> Sequence[TransferredValue]:
        """Return all that another worker sends to this one."""
        stream = self.data_flow.list_stream(source, self._worker, self._options.schedule.workers[source])
        outputs = [
            replace(output.described, key=("output", number))
            for number, output in enumerate(self._describe_outputs())
            if output.worker == source and output.is_shared and output.repeats is None
        ]
        return [*stream, *outputs]

    def _describe_outputs(self) -> Sequence[StepOutput]:
        """Return what becomes of each output."""
        first: dict[str, int] = {}
        outputs = self._partition.graphs[0].outputs
        found = []
        for number, (node, described) in enumerate(outputs):
            value = self._partition.program.outputs[number][0].meta["val"]
            is_gradient = described.kind == "gradient"
            is_owned = is_gradient and described.name in self._owned
            is_late_check = described.kind == "check" and self._partition.phases[node.name] != "free"
            is_shared = not is_owned and (described.kind != "check" or is_late_check)
            shape = self._storage.get_shard_shape(described.name, value, self._worker) if is_gradient else value.shape
            earlier = first.setdefault(node.name, number) if is_shared and described.kind != "gradient" else number
            found.append(
                StepOutput(
                    worker=self._worker if self._worker in self._returned[number] else self._returned[number][0],
                    is_shared=is_shared,
                    is_gradient=is_gradient,
                    repeats=None if earlier == number else earlier,
                    described=describe_tensor(described.name, value, shape),
                    check=ValueCheck(described.index, described.expected) if is_late_check else None,
                )
            )
        return found

    def _generate(self, graph: fx.Graph) -> Callable[..., Sequence[Tensor]]:
        self.collectives += [node.meta["collective"] for node in graph.nodes if "collective" in node.meta]
        return generate_function(graph)

    def _build_prepare(self, draws: RandomDraws) -> PartFunction:
        """Build what runs before all units."""
        own = Part("prepare", self._worker)
        part = PartGraph(self.data_flow, self._worker, own, draws)
        needed = {
            need: None
            for source in range(self._workers)
            for need in self.data_flow.list_needed(self._worker, Part("prepare", source))
        }
        sent = {target: self.data_flow.list_sent(own, target) for target in range(self._workers)}
        for node in self._partition.list_checks():  # before anything is sent: all workers stop at the same one
            part.get(ValueKey(node.name))
        for node in self._partition.list_drawing():
            part.note_draw(node)
        self._add_values(part, own, sent)
        keys = [
            key
            for need in needed
            if self._partition.phases[need.name] != "input" or self.data_flow.is_remote(need.name, self._worker)
            for key in self.data_flow.list_keys(need)
        ]
        outputs = [part.get(key) for key in keys]
        kept = self._gathers.add(part, outputs)
        return PartFunction(
            function=self._generate(part.graph), inputs=tuple(part.inputs), outputs=tuple(keys), gathered=kept
        )

    def _add_values(self, part: PartGraph, own: Part, sent: Mapping[int, Collection[Need]]) -> None:
        """Compute the values of a part in the program's order, and send those that other workers need."""
        for node in self._partition.nodes:
            need = Need(node.name)
            if self._partition.phases[node.name] == own.phase and self.data_flow.find_part(node.name) == own:
                for key in self.data_flow.list_keys(need):
                    part.get(key)
            for target, needs in sent.items():
                for key in self.data_flow.list_keys(need) if need in needs else ():
                    part.send(key, target)

    def _build_unit(self, unit: Unit, draws: RandomDraws) -> PartFunction:
        """Build what a stage computes for a microbatch."""
        own = Part.of(unit)
        part = PartGraph(self.data_flow, self._worker, own, draws)
        sums = [need.name for need in self._list_own_sums(own)]
        added = set() if self._is_first(unit) else {name for name in sums if self._can_be_added(name, unit.microbatch)}
        for node in self._partition.nodes:
            phase = self._partition.phases[node.name]
            if node.name in added:
                part.add_to_sum(node.name, unit.microbatch)
            elif phase not in ("input", "free") and self.data_flow.find_part(node.name) == own:
                part.get(ValueKey(node.name, unit.microbatch))
        values: dict[str, None] = {}
        for target in range(self._workers):
            for need in self.data_flow.list_needed(target, own, unit.microbatch):
                values[need.name] = None
        sums = [name for name in sums if name not in added]
        keys = [ValueKey(name, unit.microbatch) for name in values]
        outputs = [part.get(key) for key in [*keys, *[ValueKey(name, unit.microbatch) for name in sums]]]
        kept = self._gathers.add(part, outputs)
        return PartFunction(
            function=self._generate(part.graph),
            inputs=tuple(part.inputs),
            outputs=tuple(keys),
            sums=tuple(sums),
            gathered=kept,
            owned=frozenset(filter(self._has_own_memory, sums)),
        )

    def _is_first(self, unit: Unit) -> bool:
        """Return whether this worker runs the unit before those of the same part for other microbatches."""
        units = self._options.schedule.workers[self._worker]
        return unit == next(other for other in units if Part.of(other) == Part.of(unit))

    def _can_be_added(self, name: str, microbatch: int) -> bool:
        """Return whether the operator of a microbatch's value can add it to a sum, and nothing else takes it."""
        target = self._partition.copies[microbatch][name].target
        return target in ADDING_VARIANTS and self._has_own_memory(name)

    def _has_own_memory(self, name: str) -> bool:
        """Return whether an operator gives a value new memory, and nothing takes the value but sums of it."""
        node = self._partition.by_name[name]
        is_new = is_fresh(node) or node.target is run_linear_weight
        return is_new and all(user.op == "output" or self._partition.takes_sum(user) for user in node.users)

    def _list_own_sums(self, own: Part) -> Sequence[Need]:
        """Return the values of a unit whose sums over microbatches are needed somewhere."""
        found = {
            need: None
            for needs in self.data_flow.needs.values()
            for need in needs
            if need.is_sum and self.data_flow.find_part(need.name) == own
        }
        return list(found)

    def _build_finish(self, draws: RandomDraws) -> PartFunction:
        """Build what runs after all units, with the sums of gradients over the data axes."""
        own = Part("finish", self._worker)
        part = PartGraph(self.data_flow, self._worker, own, draws)
        sent = {target: self.data_flow.list_sent(own, target) for target in range(self._workers)}
        for target, needs in sent.items():
            for need in needs:
                for key in self.data_flow.list_keys(need) if need.is_sum else ():
                    part.send(key, target)
        self._add_values(part, own, sent)
        local, program = self._add_outputs(part)
        local = schedule_gradients(local, program, self._storage)
        return PartFunction(function=self._generate(local.graph), inputs=tuple(part.inputs))

    def _add_outputs(self, part: PartGraph) -> tuple[LocalGraph, LogicalProgram]:
        """Add the outputs that this worker returns first, and return them as a program of their own."""
        outputs, logical, pending = [], [], []
        uses = Counter(node for node, _ in self._partition.graphs[0].outputs)
        pairs = zip(self._partition.graphs[0].outputs, self._partition.program.outputs, self._returned, strict=True)
        for (node, described), output, workers in pairs:
            if self._worker not in workers:
                continue
            is_unit = self._partition.phases[node.name] in UNIT_KINDS
            is_sum = is_unit and self._partition.is_partial(node)
            if is_unit or self.data_flow.is_single(node.name) or not self._partition.is_partial(node):
                key = ValueKey(node.name, None if is_sum or self.data_flow.is_single(node.name) else 0, is_sum=is_sum)
                value = part.call(take_sum, (part.get(key),))
            else:  # terms that are known after all units
                value = part.call(add_terms, ([part.get(key) for key in self.data_flow.list_keys(Need(node.name))],))
            value.meta.update(node.meta)
            axes = tuple(axis for axis in node.meta.get("summed_along", ()) if axis.name != MICROBATCH)
            value.meta["summed_along"] = axes
            value.meta["has_own_memory"] = is_sum and uses[node] == len(node.users) == 1
            outputs.append((value, described))
            logical.append(output)
            if axes:
                pending.append(value)
        self._gathers.add(part, [node for node, _ in outputs])
        local = LocalGraph(graph=part.graph, inputs=(), outputs=tuple(outputs), pending_gradients=tuple(pending))
        return local, replace(self._partition.program, outputs=tuple(logical))


class StageGathers:
    """Adds the gathers of one worker to the parts of its step; see Note [gathers in stages].

    Args:
        parts: Its parts in the order in which they run, one for each unit.
        storage: Which parameters are stored in pieces.
    """

    def __init__(self, data_flow: DataFlow, worker: int, parts: Sequence[Part], storage: StateStorage) -> None:
        partition = data_flow.partition
        self._axis = storage.axis
        self._names: dict[str, str] = {}
        self._layouts: dict[str, ShardLayout] = {}
        self._values: dict[str, LogicalValue] = {}
        for local, described in partition.graphs[0].inputs:
            placement = storage.values.get(described.name)
            is_whole = described.name in storage.shared or data_flow.is_remote(local.name, worker)
            if placement is not None and not is_whole:
                value = local.meta["value"][0].meta["val"]
                self._names[local.name] = described.name
                self._layouts[local.name] = storage.make_layout(described.name, value, placement)
                self._values[local.name] = value
        self._last_part = {
            need.name: number for number, part in enumerate(parts) for need in data_flow.needs.get(part, ())
        }
        self._gathered: set[str] = set()
        self._added = 0

    def add(self, part: PartGraph, outputs: Sequence[fx.Node]) -> tuple[ValueKey, ...]:
        """Let the next part return its outputs, and gather what no part before it has gathered.

        Args:
            part: The part. This is called for all of them, in order.
            outputs: What it returns.

        Returns:
            What later parts use of what it gathers. The part returns it after the outputs.
        """
        new = [key for key in part.inputs if key.name in self._layouts and key.name not in self._gathered]
        kept = tuple(key for key in new if self._last_part[key.name] > self._added)
        self._added += 1
        part.graph.output((*outputs, *[part.inputs[key] for key in kept]))
        self._gathered.update(key.name for key in new)
        if new and self._axis is not None:
            self._add_gathers(part.graph, {part.inputs[key]: key.name for key in new})
        return kept

    def _add_gathers(self, graph: fx.Graph, names: dict[fx.Node, str]) -> None:
        """Gather inputs of a graph, which lie in it in pieces."""
        assert self._axis is not None
        values = {node: self._values[name] for node, name in names.items()}
        sizes = {node: count_bytes(value) for node, value in values.items()}
        positions = {node: place for place, node in enumerate(graph.nodes)}
        gathered = []
        for node, name in names.items():
            node.meta["described"] = self._names[name]
            users = sorted(node.users, key=positions.__getitem__)
            gathered.append(GatheredValue(node, [ParameterUse(node, node, user, positions[user]) for user in users]))
        gathered.sort(key=lambda item: item.position)
        limit = limit_group([count_bytes(value) for value in self._values.values()])
        layouts = {node: self._layouts[name] for node, name in names.items()}
        add_gathers(graph, group_values(gathered, values, sizes, limit), layouts, values, self._axis)
