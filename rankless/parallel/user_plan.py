"""What a script says of the division of a model along the axes of the mesh: in a job's plan, or at its modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import nn
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from rankless.errors import ConfigError
from rankless.records.parallel_plan import PipelineSchedule

MICROBATCHES_PER_WORKER = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How Rankless distributes a job over the workers, if not by default.

    A plan chooses which worker computes which values, and in which order. The results are the same under every plan.

    Args:
        schedule: The order of work along the axis `pipeline`: "gpipe" does all forward passes first, and holds the
            activations of all microbatches. "1f1b" holds those of at most as many microbatches as there are stages.
            "interleaved" has two stages on each worker, and waits less. "zero-bubble" computes gradients of parameters
            while it would wait. Default: "1f1b".
        microbatches: The number of microbatches into which the axis `pipeline` cuts a batch. A batch with fewer samples
            has fewer. Default: two for each worker along the axis.
        stages: The modules at which the stages after the first begin, by their names in the job, such as
            `("model.layers.4", "model.layers.8")`; or "measured": rank 0 runs each operator before the first step, and
            the stages take about equal time. Default: Rankless estimates the work, and makes it about equal.
        tensor: How the axis `tensor` shards parameters: "auto", or a dict from names of parameters to
            `torch.distributed.tensor.Shard(dim)` or `Replicate()`. A name may be a pattern as in a shell, and begin
            anywhere after a dot: `"*.mlp.up.weight"`. Rankless shards dims that belong to a named parameter with it,
            such as the bias of a layer and the input features of the next one; all others are whole. Default: "auto",
            which shards attention by heads, MLPs by hidden features, convolutions by channels, embeddings and heads by
            words, if the program of the job allows it.
        sequence_parallel: Whether the axis `tensor` also shards the activations between its layers, as Megatron's
            sequence parallelism does: each worker computes residual sums, norms and dropout for a shard of the
            positions. This sends as many bytes, and needs less memory. Default: False.
        experts: Which parameters the axis `expert` shards across workers, and along which dim: "auto", or a dict as
            for `tensor=`. Default: "auto", which shards parameters with one row for each expert, as `(experts, inputs,
            outputs)`, with which a batched matrix product computes, and the dims that belong to them.
        sequence: The dim of each tensor argument that the axis `sequence` shards, by the argument's name; None for
            one without positions. Default: "auto", the first dim besides that of the batch. It affects speed, not
            results.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> rankless.Plan(schedule="gpipe", microbatches=8).microbatches
        8
    """

    schedule: PipelineSchedule = "1f1b"
    microbatches: int | None = None
    stages: tuple[str, ...] | Literal["measured"] | None = None
    tensor: Literal["auto"] | Mapping[str, Placement] = "auto"
    sequence_parallel: bool = False
    experts: Literal["auto"] | Mapping[str, Placement] = "auto"
    sequence: Literal["auto"] | Mapping[str, int | None] = "auto"

    def __post_init__(self) -> None:
        if self.schedule not in get_args(PipelineSchedule):
            raise ConfigError(
                expected=f"schedule= as one of {', '.join(map(repr, get_args(PipelineSchedule)))}",
                found=f"schedule={self.schedule!r}",
                fix='omit it for "1f1b"',
            )
        count = self.microbatches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(
                expected="microbatches= as a number from 1 up",
                found=f"microbatches={count!r}",
                fix="omit it for two microbatches for each worker along the axis pipeline",
            )
        stages = self.stages
        is_list = isinstance(stages, list | tuple) and all(isinstance(name, str) for name in stages)
        if stages is not None and stages != "measured" and not is_list:
            raise ConfigError(
                expected="stages= as the names of modules, such as ('model.layers.4',), or as 'measured'",
                found=f"stages={stages!r}",
                fix="omit it, and Rankless chooses the stages",
            )
        if self.tensor != "auto":
            require_placements("tensor", self.tensor, "*.mlp.up.weight")
        if self.experts != "auto":
            require_placements("experts", self.experts, "*.experts.up")
        if self.sequence != "auto":
            require_dims(self.sequence)
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                expected="sequence_parallel= as True or False",
                found=f"sequence_parallel={self.sequence_parallel!r}",
                fix="use one of them",
            )
        if isinstance(stages, list):
            object.__setattr__(self, "stages", tuple(stages))

    def count_microbatches(self, workers: int) -> int:
        """Return the number of microbatches of a batch with enough samples.

        Args:
            workers: The number of workers along the axis `pipeline`.
        """
        return self.microbatches or MICROBATCHES_PER_WORKER * workers


PlanSource = Plan | Callable[..., Plan]
"""A plan, or a function that returns it, called with the models of the job."""


def require_dims(sequence: object) -> None:
    """Raise `ConfigError` if `sequence=` is no dict from names to dims."""
    is_dict = isinstance(sequence, Mapping) and all(
        isinstance(name, str) and (dim is None or (type(dim) is int and dim >= 0)) for name, dim in sequence.items()
    )
    if not is_dict:
        raise ConfigError(
            expected='sequence= as "auto", or a dict from names of tensor arguments to dims counted from 0, or None',
            found=f"sequence={sequence!r}",
            fix='for example sequence={"words": 1, "labels": 1}',
        )


def require_placements(option: str, given: object, example: str) -> None:
    """Raise `ConfigError` if an option is no dict from names to placements.

    Args:
        option: The option.
        given: Its value.
        example: A name, for the error.
    """
    found = f"{option}={given!r}"
    if isinstance(given, Mapping):
        wrong = [
            (name, placement)
            for name, placement in given.items()
            if not isinstance(name, str) or type(placement) not in (Shard, Replicate)
        ]
        if not wrong:
            return
        found = f"{wrong[0][1]!r} for {wrong[0][0]!r}"
    raise ConfigError(
        expected=f'{option}= as "auto", or a dict from names of parameters to Shard(dim) or Replicate() of '
        "torch.distributed.tensor",
        found=found,
        fix=f'for example {option}={{"{example}": Shard(0)}}',
    )


LayerAxis = Literal["tensor", "expert"]
Module = TypeVar("Module", bound=nn.Module)
# An attribute of the module: it is copied with the module, and is no part of its state.
ATTRIBUTE = "_rankless_placements"
EXAMPLE = 'for example rankless.place(nn.Linear(64, 256), {"weight": Shard(0)})'


def place(module: Module, placements: Placement | Mapping[str, Placement], *, axis: LayerAxis = "tensor") -> Module:
    """Say at a module how an axis of the mesh divides its parameters.

    Without this axis, and on one device, it has no effect. What must be divided together with a named parameter
    follows it, and all other parameters are divided as the plan of the job says. The plan has priority:
    `rankless.Plan(tensor=…)` and `rankless.Plan(experts=…)`, and a plan file.

    Args:
        module: The module.
        placements: `torch.distributed.tensor.Shard(dim)` or `Replicate()` for all parameters of the module, or a dict
            from names of its parameters, which may be patterns as in a shell.
        axis: The axis: "tensor" or "expert".

    Returns:
        The module itself.

    Raises:
        ConfigError: An argument is invalid, or a name matches no parameter of the module.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Shard
        >>> layer = rankless.place(torch.nn.Linear(8, 32), {"weight": Shard(0)})
        >>> type(layer).__name__
        'Linear'
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(expected="a module of PyTorch", found=type(module).__name__, fix=EXAMPLE)
    if axis not in get_args(LayerAxis):
        raise ConfigError(
            expected=f"axis= as one of {', '.join(map(repr, get_args(LayerAxis)))}", found=f"axis={axis!r}", fix=EXAMPLE
        )
    given = placements if isinstance(placements, Mapping) else {"*": placements}
    for name, placement in given.items():
        if not isinstance(name, str) or type(placement) not in (Shard, Replicate):
            raise ConfigError(
                expected="Shard(dim) or Replicate() of torch.distributed.tensor, or a dict from names to them",
                found=f"{placement!r} for {name!r}" if isinstance(placements, Mapping) else repr(placements),
                fix=EXAMPLE,
            )
    known = getattr(module, ATTRIBUTE, {})
    setattr(module, ATTRIBUTE, {**known, axis: {**known.get(axis, {}), **given}})
    return module


def list_placed(root: nn.Module, axis: str) -> list[tuple[str, nn.Module, Mapping[str, Placement]]]:
    """Return the modules in a model that carry placements for an axis, outer ones first, with their names.

    Args:
        root: The model.
        axis: The axis.
    """
    found = ((name, module, getattr(module, ATTRIBUTE, {}).get(axis)) for name, module in root.named_modules())
    return [(name, module, placements) for name, module, placements in found if placements]
