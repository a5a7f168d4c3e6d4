"""The owner that divides states between the workers along an axis: each holds, and steps on, its shards.

Note [ZeRO]: this is ZeRO (Rajbhandari et al., SC 2020). What is divided is in the job's plan: the state of optimizers
(stage 1), also gradients (2), or also parameters (3). Let p[r] be the shard of a parameter that worker r has, s[r] the
optimizer's state for it, and g_k the gradient of the rows of worker k. A step is

    g[r] = sum over k of g_k[r]                 a reduce-scatter, or in stage 1 a part of an all-reduce
    p[r], s[r] = optimizer(p[r], g[r], s[r])
    p = p[0], p[1], …                           an all-gather: after the step, or in stage 3 before each use

The optimizer computes each element from the elements at the same place, so the workers together make the step of one
device. `compiler.scheduling` puts the collectives into programs; this file has what lies between them.

Note [owners within owners]: an owner divides states along one axis. It gives its shards, and what it does not divide,
to the owner within it, as that worker's states. That one may divide them along another axis, or take them as they are.
While an optimizer steps, the state of a shard is that of a parameter for the owner within. What workers compute
together follows when the step is over, from the innermost owner outwards, because it may be repeated without a worker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.collectives.mesh_collectives import all_reduce, all_reduce_maximum
from rankless.ownership.adjacent_shards_in_shared_memory import SharedMemoryShards, SharedValue
from rankless.ownership.host_device_copies import copy_to_device, copy_to_host
from rankless.ownership.optimizer_parameter_shards import DividedParameter, gather_after_step, make_divided_parameter
from rankless.ownership.partitioned_tensor import (
    Partition,
    RunTogether,
    WholeValues,
    get_local,
    list_partitions,
    make_partitioned_tensor,
    run_directly,
)
from rankless.ownership.shard_layout import ShardLayout, gather_shards, send_to_copies
from rankless.ownership.state_divisions_along_axis import (
    omit_divisions,
    read_placement,
    require_same_division,
    select_divisions,
)
from rankless.ownership.state_owner import GradientSums, Replica, StateOwner, get_elements
from rankless.ownership.states_of_survivors import DividedStates
from rankless.ownership.step_on_shards import (
    find_state_layout,
    list_parameters,
    list_state_partitions,
    on_shards,
    share_state,
)
from rankless.ownership.unread_tensor import UnreadTensor
from rankless.parallel.mesh import Mesh, MeshAxis, WorkerGroup
from rankless.parallel.tensor_placement import BlockedShard, Shard
from rankless.records.parallel_plan import JobPlan, StatePlan


class ShardedStateOwner(StateOwner):
    """Holds shards of the states that plans divide along an axis; see Note [owners within owners].

    Args:
        axis: The workers that divide states.
        require_all: Called with what is about to be gathered for the script. Raises if not all workers take part.
        shares_values: Whether workers of one host may hold divided values in one memory.
        within: Holds the shards, and what this owner does not divide. Default: every worker holds all of it.
        run: Makes what workers compute together outside of jobs, again if one of them is lost. Default: it does not.
        copy_holders: For each worker the one with copies of its shards; none without. See Note [copies of shards].
    """

    def __init__(
        self,
        axis: MeshAxis,
        require_all: Callable[[str], None],
        *,
        shares_values: bool = True,
        within: StateOwner | None = None,
        run: RunTogether = run_directly,
        copy_holders: Sequence[int] = (),
    ) -> None:
        self._axis = axis
        self._within = StateOwner() if within is None else within
        self._outer: ShardedStateOwner | None = None
        """The owner that gives its shards to this one."""
        if isinstance(self._within, ShardedStateOwner):
            self._within._outer = self
        self._run = run
        inner: WholeValues | None = within._values if isinstance(within, ShardedStateOwner) else None
        self._values: WholeValues = WholeValues(axis, require_all, run, copy_holders, inner)
        self._shared = SharedMemoryShards(axis)
        self._shares_values = shares_values
        self._own_version = 0
        self._divided: dict[int, DividedParameter] = {}
        self._optimizers: list[Optimizer] = []
        """Those that step divided parameters."""
        self._holders: dict[int, DividedParameter] = {}
        """The parameter of each holder with a shard of a gradient, by the id of the holder."""
        self._holders_version = 0
        self._sums: list[GradientSums] = []
        self._is_gathering = False
        """Whether parameters that every worker has whole are older than their shards."""

    @property
    def version(self) -> int:
        """Changes whenever more parameters are divided."""
        return self._own_version + self._within.version

    def divide(
        self,
        plan: JobPlan,
        tensors: Mapping[str, Tensor],
        *,
        line: str,
        complete: Callable[[str, Tensor], None] | None = None,
        copies: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Divide the parameters of a job as its plan says, and free the whole ones. Collective.

        All workers have the same whole ones.

        Args:
            plan: The job's plan.
            tensors: The job's parameters and buffers by name.
            line: The job's line, for errors.
            complete: Called with the name of a parameter that is about to be divided, and the parameter, which has a
                value afterwards. Each is then freed before the next. Default: all have values.
            copies: The workers with copies of parameters that one worker has, by name; see Note [copies of shards].

        Raises:
            ConfigError: Another job divides a parameter in another way.
        """
        own = {name: select_divisions(state, self._axis) for name, state in plan.states.items()}
        new: dict[str, tuple[nn.Parameter, ShardLayout]] = {}
        for name, state in own.items():
            parameter = tensors[name]
            if not state.optimizer_state or not isinstance(parameter, nn.Parameter):
                continue
            placement = read_placement(state.optimizer_state[0], parameter)
            known = self._divided.get(id(parameter))
            if known is None:
                new[name] = parameter, ShardLayout.of(parameter, placement, (copies or {}).get(name, ()))
            else:
                require_same_division(known, placement, state, line)
        shared = {}
        if self._shares_values:
            shared = self._shared.allocate([(name, *item) for name, item in new.items() if own[name].value])
        for name, (parameter, layout) in new.items():
            if complete is not None:
                complete(name, parameter)
            self._divide_one(name, parameter, layout, own[name], shared.get(name))
            if complete is not None:
                self.begin_call()
        self.begin_call()
        if isinstance(self._within, ShardedStateOwner):
            left = JobPlan(states={name: omit_divisions(state, self._axis) for name, state in plan.states.items()})
            shards = {name: self._get_own_holder(tensors[name]) for name in plan.states}
            self._within.divide(left, shards, line=line, complete=complete and only_for(complete, tensors, shards))

    def _divide_one(
        self, name: str, parameter: nn.Parameter, layout: ShardLayout, plan: StatePlan, shared: SharedValue | None
    ) -> None:
        """Divide a parameter that is not divided yet."""
        actual = ShardLayout.of(parameter, layout.placement, layout.copies)
        if actual != layout:  # a deferred parameter lies otherwise in memory than its recording says
            layout, shared = actual, None
        divided = make_divided_parameter(parameter, layout, self._values, name=name, state=plan, shared=shared)
        self._divided[id(parameter)] = divided
        self._own_version += 1

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Note optimizers whose states are divided with the parameters that they step."""
        self._optimizers += [each for each in optimizers if not any(each is known for known in self._optimizers)]
        if isinstance(self._within, ShardedStateOwner):
            self._within.note_optimizers(optimizers)

    def list_levels(self) -> "list[ShardedStateOwner]":
        """Return this owner and those within it, from the innermost; see Note [owners within owners]."""
        inner = self._within.list_levels() if isinstance(self._within, ShardedStateOwner) else []
        return [*inner, self]

    @property
    def outer_ranks(self) -> tuple[int, ...]:
        """The ranks of this worker along the axes of outer owners: those with the same ones divide the same shards."""
        return () if self._outer is None else (*self._outer.outer_ranks, self._outer._axis.rank)

    @contextmanager
    def _on_outer_shards(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Within the context, optimizers have the shards of outer owners in place of parameters. Collective."""
        with ExitStack() as contexts:
            if self._outer is not None:
                contexts.enter_context(self._outer._on_outer_shards(optimizers))
                for each in optimizers:
                    contexts.enter_context(on_shards(each, self._outer._divided, self._outer._values))
            yield

    def collect_states(self, mesh: Mesh, *, with_gradients: bool) -> Callable[[], None]:
        """Return a function that makes the states that this owner divides whole, after a worker was lost. Collective.

        Args:
            mesh: The workers that are left with the same `outer_ranks`; see Note [states of lost workers].
            with_gradients: Whether a step follows with the gradients that workers have.

        Raises:
            LostWorkerError: All workers were lost that had a state.
        """
        has_copies = (
            self._values.copy_holders or self._axis.stage_workers or isinstance(self._within, ShardedStateOwner)
        )
        option = "" if has_copies else ", with --copies 1"
        divided = DividedStates(
            self._values,
            list(self._divided.values()),
            self._optimizers,
            self._sums,
            is_gathering=self._is_gathering,
            fix=f"start the run again from a checkpoint{option}; --restarts N does so",
        )
        with self._on_outer_shards(self._optimizers):
            make_whole = divided.collect(mesh, with_gradients=with_gradients)

        def finish() -> None:
            with self._on_outer_shards(self._optimizers):
                make_whole()
            self._divided.clear()
            self._values.end()
            self._is_gathering = False
            self._own_version += 1

        return finish

    def _get_own_value(self, tensor: Tensor) -> Tensor:
        """Return what the owner within has of a value."""
        known = self._divided.get(id(tensor))
        return known.shard if known is not None and known.divides_value else tensor

    def _get_own_shard(self, tensor: Tensor) -> Tensor:
        """Return what the owner within steps on."""
        known = self._divided.get(id(tensor))
        return tensor if known is None else known.shard

    def _get_own_holder(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose gradient the owner within has."""
        known = self._divided.get(id(tensor))
        return tensor if known is None else known.holder

    def begin_call(self) -> None:
        """Take the changes of the script to whole values. Collective if it has read any."""
        if self._values.is_open:
            self.begin_write()
            self._values.write_back()
        self._within.begin_call()

    def end_call(self) -> None:
        """Update the whole values that the script holds. Collective if there are any."""
        self._values.refresh()
        self._within.end_call()

    def get_holders(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return for each parameter the tensor that has this worker's gradient."""
        return self._within.get_holders(list(map(self._get_own_holder, parameters)))

    def take_gradients(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Give the holder of each parameter its gradient, on the host if its shard is there."""
        known = [self._divided.get(id(item)) for item in parameters]
        moved = [
            place
            for place, item in enumerate(known)
            if item is not None and item.divides_gradient and item.is_offloaded
        ]
        placed = list(gradients)
        if moved:
            for place, gradient in zip(moved, copy_to_host([gradients[place] for place in moved]), strict=True):
                placed[place] = gradient
        self._within.take_gradients(list(map(self._get_own_holder, parameters)), placed)

    def copy_gradients(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], None]:
        """Send the gradients of shards to the workers that have copies of these. Collective if there are any.

        Args:
            parameters: The parameters.
            gradients: What this worker has of the gradient of each, as a program has computed it.

        Returns:
            A function that gives the copies of this worker their gradients.
        """
        known = [self._divided.get(id(item)) for item in parameters]
        if not self._values.copy_holders:
            return self._within.copy_gradients(list(map(self._get_own_holder, parameters)), gradients)
        pairs = [
            (item, gradient)
            for item, gradient in zip(known, gradients, strict=True)
            if item is not None and item.divides_gradient
        ]
        received = send_to_copies(
            [item.layout for item, _ in pairs],
            [gradient for _, gradient in pairs],
            self._values.copy_holders,
            self._axis,
        )

        def finish() -> None:
            for item in self._divided.values():
                for copy in item.copies.values():
                    copy.grad = None
            for (item, _), copied in zip(pairs, received, strict=True):
                for worker, copy in item.copies.items():
                    copy.grad = item.place(copied[worker])

        return finish

    def get_copies(self, parameter: Tensor) -> dict[int, Tensor]:
        """Return the copies of other workers' shards of a parameter that have gradients of their own, by worker."""
        known = self._divided.get(id(parameter))
        within = self._within.get_copies(self._get_own_holder(parameter))
        return {**known.copies, **within} if known is not None and known.divides_gradient else within

    def copy_gradient(self, parameter: Tensor, whole: Tensor, worker: int) -> Tensor:
        """Return what the copy of a worker's shard of a parameter has of a whole gradient."""
        known = self._divided.get(id(parameter))
        if known is not None and self._values.copy_holders:
            return known.place(known.layout.copy_shard(whole, worker))
        own = whole if known is None else known.layout.get_shard(whole, self._axis.rank)
        return self._within.copy_gradient(self._get_own_holder(parameter), own, worker)

    def measure_copies(self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> int:
        """Return the bytes of this worker's copies of other workers' shards, with their gradients and states."""
        known = [self._divided[id(item)] for item in parameters if id(item) in self._divided]
        if not self._values.copy_holders:
            with ExitStack() as contexts:
                for each in optimizers:
                    contexts.enter_context(on_shards(each, self._divided, self._values))
                return self._within.measure_copies(list(map(self._get_own_shard, parameters)), optimizers)
        values = [
            copy.nbytes * ((not item.shares_memory) + item.divides_gradient)
            for item in known
            for copy in item.copies.values()
        ]
        states = [each for optimizer in optimizers for each in list_state_partitions(optimizer, known)]
        return sum(values) + sum(copy.nbytes for each in states for copy in each.copies.values())

    def note_sums(self, sums: GradientSums) -> None:
        """Note what accumulates gradients, which are made whole after a worker was lost."""
        if not any(each is sums for each in self._sums):
            self._sums.append(sums)
            self._within.note_sums(sums)

    def get_value(self, tensor: Tensor) -> Tensor:
        """Return what this worker has of a parameter or buffer."""
        return self._within.get_value(self._get_own_value(tensor))

    def get_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what a program takes of parameters and buffers: the whole value in shared memory, or the shard."""
        found = [self._divided.get(id(item)) for item in tensors]
        if any(known is not None and known.shared is not None for known in found):
            self._shared.begin_read()
        return self._within.get_inputs(
            [
                self._get_own_value(item) if known is None or known.shared is None else known.shared.whole
                for item, known in zip(tensors, found, strict=True)
            ]
        )

    def find_shared_memory(self, tensor: Tensor) -> int | None:
        """Return the number of the memory in which workers share the value; None if they do not."""
        known = self._divided.get(id(tensor))
        if known is not None and known.shared is not None:
            return known.shared.memory
        return self._within.find_shared_memory(self._get_own_value(tensor))

    def begin_write(self) -> None:
        """Wait until no worker reads values that workers share."""
        self._shared.begin_write()
        self._within.begin_write()

    def set_value(self, tensor: Tensor, whole: Tensor) -> None:
        """Take a new whole value of a parameter or buffer."""
        known = self._divided.get(id(tensor))
        if known is None or not known.divides_value:
            self._within.set_value(tensor, whole)
            return
        if known.shared is not None:
            self._shared.begin_write()
        self._values.are_shards_newer = True
        self._within.set_value(known.shard, known.layout.get_shard(whole, self._axis.rank))
        for worker, copy in known.copies.items():
            self._within.set_value(copy, known.layout.get_shard(whole, worker))

    def find_value_placements(self, tensor: Tensor) -> dict[str, Shard | BlockedShard]:
        """Return how the value of a parameter or buffer is divided, by axis; nothing for a whole one."""
        known = self._divided.get(id(tensor))
        own = {self._axis.name: known.layout.placement} if known is not None and known.divides_value else {}
        return own | self._within.find_value_placements(self._get_own_value(tensor))

    def find_copies(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the workers that have a copy of what one worker has of a parameter."""
        known = self._divided.get(id(tensor))
        return () if known is None else known.layout.copies

    def find_replica(self, tensor: Tensor) -> Replica:
        """Return this worker's shard of a divided tensor, or a whole one."""
        return Replica(get_local(tensor), tuple(partition.group for partition in list_partitions(tensor)))

    def find_gradient_placements(self, parameter: Tensor) -> dict[str, Shard | BlockedShard]:
        """Return how the gradient of a parameter is divided, by axis; nothing for a whole one."""
        known = self._divided.get(id(parameter))
        own = {self._axis.name: known.layout.placement} if known is not None and known.divides_gradient else {}
        return own | self._within.find_gradient_placements(self._get_own_holder(parameter))

    def gather_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the whole gradient of a parameter; None if it has none."""
        known = self._divided.get(id(parameter))
        shard = self._within.gather_gradient(self._get_own_holder(parameter))
        if shard is None or known is None or not known.divides_gradient:
            return shard
        return gather_shards([known.layout], [copy_to_device(shard, parameter.device)], among=self._axis)[0]

    def divide_gradient(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return a copy of what this worker holds of a whole gradient."""
        known = self._divided.get(id(parameter))
        if known is None or not known.divides_gradient:
            return self._within.divide_gradient(parameter, whole)
        return known.place(self._within.divide_gradient(known.shard, known.layout.get_shard(whole, self._axis.rank)))

    def take_state(self, parameter: Tensor, key: str, stored: UnreadTensor) -> Tensor:
        """Return an entry of a parameter's optimizer state: divided like the parameter, with this worker's shard."""
        known = self._divided.get(id(parameter))
        layout = None if known is None else find_state_layout(tuple(stored.shape), known)
        if known is None or layout is None:
            return self._within.take_state(parameter, key, stored)
        own = stored.partition.select(layout.placement.dim, layout.list_ranges(self._axis.rank))
        shard = self._within.take_state(known.shard, key, UnreadTensor(own))
        if isinstance(shard, UnreadTensor):
            shard = read_shard(stored, layout, self._axis.rank, known.shard.device)
        copies = {worker: read_shard(stored, layout, worker, known.shard.device) for worker in known.copies}
        name = f"{key} of {known.name}"
        return make_partitioned_tensor(
            Partition(layout, shard, name, self._values, device=known.parameter.device, copies=copies)
        )

    def find_axes(self, holder: Tensor) -> tuple[WorkerGroup, ...]:
        """Return the axes whose workers have shards of the gradient of which a holder has one."""
        own = (self._axis,) if id(holder) in self._get_holders() else ()
        return (*own, *self._within.find_axes(holder))

    def _get_holders(self) -> dict[int, DividedParameter]:
        """Return the parameter of each holder of a shard, by the id of the holder."""
        if self._holders_version != self.version:
            known = [item for item in self._divided.values() if item.divides_gradient]
            holders = self._within.get_holders([item.shard for item in known])
            self._holders = {id(holder): item for holder, item in zip(holders, known, strict=True)}
            self._holders_version = self.version
        return self._holders

    def measure_norm(self, holders: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, equal on all workers. Collective if gradients are divided.

        As in `torch.nn.utils.get_total_norm` it is the norm of the norms of all tensors, each in its own dtype.
        """
        found = [(self._get_counted(item), self.find_axes(item)) for item in holders if item.grad is not None]
        whole = [gradient for gradient, axes in found if not axes]
        shards = [(gradient, axes) for gradient, axes in found if axes]
        norms = list(torch._foreach_norm(whole, 2.0)) if whole else []
        if shards:
            is_double = any(item.dtype in (torch.float64, torch.complex128) for item, _ in shards)
            accumulated = torch.float64 if is_double else torch.float32
            real = [torch.view_as_real(item) if item.is_complex() else item for item, _ in shards]
            squares = torch.stack([torch.linalg.vector_norm(item, 2.0, dtype=accumulated) ** 2 for item in real])
            summed = copy_to_device(squares, self._find_device(holders))
            for axis in dict.fromkeys(axis for _, axes in shards for axis in axes):
                places = [place for place, (_, axes) in enumerate(shards) if axis in axes]
                summed[places] = all_reduce(summed[places], among=axis)
            norms += [norm.to(item.abs().dtype) for norm, (item, _) in zip(summed.sqrt(), shards, strict=True)]
        if not norms:
            return torch.tensor(0.0, device="cpu")
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
        return total

    def _get_counted(self, holder: Tensor) -> Tensor:
        """Return what counts of a gradient: nothing of a copy."""
        assert holder.grad is not None
        known = self._get_holders().get(id(holder))
        is_copy = known is not None and self._axis.rank in known.layout.copies
        return torch.zeros_like(holder.grad) if is_copy else holder.grad

    def find_not_finite(self, holders: Sequence[Tensor]) -> int | None:
        """Return the number of the first holder whose gradient is not finite on some worker."""
        bad = [
            torch.zeros((), dtype=torch.uint8, device="cpu")
            if item.grad is None
            else (~get_elements(item.grad).isfinite().all()).to(torch.uint8)
            for item in holders
        ]
        if not bad:
            return None
        flags = torch.stack([item.to(bad[-1].device) for item in bad])
        for axis in dict.fromkeys(axis for item in holders for axis in self.find_axes(item)):
            flags = all_reduce_maximum(copy_to_device(flags, self._find_device(holders)), among=axis)
        return next((number for number, is_bad in enumerate(flags.tolist()) if is_bad), None)

    def _find_device(self, holders: Sequence[Tensor]) -> torch.device:
        """Return a device on which workers can sum what belongs to holders. Their shards may lie on the host."""
        known = self._get_holders()
        return next((known[id(item)].parameter.device for item in holders if id(item) in known), holders[0].device)

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step on this worker's shards; then all workers get the parameters that they hold whole."""
        levels = self.list_levels()
        with ExitStack() as contexts:
            known = [level._begin_step(optimizer, contexts) for level in reversed(levels)]
            levels[0]._within.step(optimizer)
        for level, members in zip(levels, reversed(known), strict=True):
            level._values.are_shards_newer = level._values.are_shards_newer or bool(members)
            level._is_gathering = level._is_gathering or any(not item.divides_value for item in members)
        # One operation, and on all workers: what inner owners share may differ between workers along outer axes.
        if any(known[1:]) or any(item.is_owned for item in known[0]) or self._is_gathering:
            self._run(lambda: self._end_step(optimizer, known), is_in_step=True)
        if self._run is not run_directly:
            self._drop_whole_states(optimizer, levels, known)
        for level in levels:
            level._is_gathering = False

    def _drop_whole_states(
        self,
        optimizer: Optimizer,
        levels: Sequence["ShardedStateOwner"],
        known: Sequence[Sequence[DividedParameter]],
    ) -> None:
        """Forget states that were whole after a loss, and are older than their shards now. Collective if there are any.

        Each level has some: what outer axes leave whole, an inner one may divide.
        """
        pairs = zip(levels, reversed(known), strict=True)
        found = [level._values.find_open(list_state_partitions(optimizer, members)) for level, members in pairs]

        def drop() -> None:
            for level in levels:
                level._values.drop_unused()

        if any(found):
            self._run(drop, is_in_step=True)

    def _begin_step(self, optimizer: Optimizer, contexts: ExitStack) -> list[DividedParameter]:
        """Give an optimizer shards in place of the divided parameters, which are returned, until contexts end."""
        known = [self._divided[id(item)] for item in list_parameters(optimizer) if id(item) in self._divided]
        if any(item.shared is not None for item in known):
            # Where a worker may be lost, a barrier ends each call, so that no worker still reads when one steps.
            self._shared.begin_write(waits=self._run is run_directly)
        contexts.enter_context(on_shards(optimizer, self._divided, self._values))
        return known

    def _end_step(self, optimizer: Optimizer, known: Sequence[Sequence[DividedParameter]]) -> None:
        """Show all workers what an optimizer has changed. Collective.

        Args:
            optimizer: The optimizer.
            known: The divided parameters that it has stepped on, of this owner and of those within it.
        """
        if isinstance(self._within, ShardedStateOwner):
            self._within._end_step(optimizer, known[1:])
        if any(item.is_owned for item in known[0]):
            with self._on_outer_shards([optimizer]):
                share_state(optimizer, self._divided, self._values)
        if self._is_gathering:
            self._gather(known[0])

    def _gather(self, stepped: Sequence[DividedParameter]) -> None:
        """Gather the parameters that every worker has whole, unless all are whole because a worker was lost."""
        still = [item for item in stepped if not item.divides_value and id(item.parameter) in self._divided]
        gather_after_step(still, self._axis)


def read_shard(stored: UnreadTensor, layout: ShardLayout, rank: int, device: torch.device) -> Tensor:
    """Return one worker's shard of a stored tensor."""
    shape, strides = layout.shard_shape(rank), layout.shard_strides(rank)
    read = stored.partition.select(layout.placement.dim, layout.list_ranges(rank)).read()
    return torch.empty_strided(shape, strides, dtype=stored.dtype, device=device).copy_(read)


def only_for(
    complete: Callable[[str, Tensor], None], tensors: Mapping[str, Tensor], shards: Mapping[str, Tensor]
) -> Callable[[str, Tensor], None]:
    """Return a function that completes a tensor unless it is a shard, which has a value."""

    def complete_whole(name: str, tensor: Tensor) -> None:
        if tensors[name] is shards[name]:
            complete(name, tensor)

    return complete_whole
