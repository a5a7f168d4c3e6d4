"""What a plan says of the shards of a state along one axis of the mesh."""

from collections.abc import Callable

import msgspec
from torch import Tensor

from rankless.errors import ConfigError
from rankless.ownership.optimizer_parameter_shards import DividedParameter
from rankless.ownership.shard_layout import fit_placement
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import BlockedShard, Shard
from rankless.records.parallel_plan import StateDivision, StatePlan


def select_divisions(state: StatePlan, axis: MeshAxis) -> StatePlan:
    """Return the plan of a state with its division along one axis only."""
    return keep_divisions(state, lambda division: division.axis == axis.name)


def omit_divisions(state: StatePlan, axis: MeshAxis) -> StatePlan:
    """Return the plan of a state without its division along one axis."""
    return keep_divisions(state, lambda division: division.axis != axis.name)


def keep_divisions(state: StatePlan, is_kept: Callable[[StateDivision], bool]) -> StatePlan:
    """Return the plan of a state with some of its divisions. One without any lies on the device."""
    kept = tuple(filter(is_kept, state.optimizer_state))
    return msgspec.structs.replace(
        state,
        value=tuple(filter(is_kept, state.value)),
        gradient=tuple(filter(is_kept, state.gradient)),
        optimizer_state=kept,
        offloaded=state.offloaded and kept[-1:] == state.optimizer_state[-1:],
    )


def read_placement(division: StateDivision, tensor: Tensor) -> Shard | BlockedShard:
    """Return the placement that a plan describes, for what other axes have left of a tensor."""
    if division.blocks > 1:
        return BlockedShard(division.dim, division.lengths)
    return fit_placement(Shard(division.dim, division.lengths), tensor.shape[division.dim])


def require_same_division(
    known: DividedParameter, placement: Shard | BlockedShard, state: StatePlan, line: str
) -> None:
    """Raise `ConfigError` for a parameter that another job divides in another way."""
    if (known.layout.placement, known.divides_value, known.divides_gradient, known.is_offloaded) != (
        placement,
        bool(state.value),
        bool(state.gradient),
        state.offloaded,
    ):
        raise ConfigError(
            expected=f"one division of {known.name} between workers",
            found="another one in an earlier job, with another zero=, offload= or plan",
            fix="pass the same zero= and offload= to all jobs whose optimizers step it",
            where=line,
        )
