"""The definition of a job: its function, models and optimizers, before it runs anywhere."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from rankless.compiler.capture.capture import JobSource
from rankless.context.redundant_step_calls import JobLabel
from rankless.errors import ConfigError
from rankless.jobs.gradient_accumulation import LossWeight
from rankless.ownership.step_on_shards import require_divisible
from rankless.parallel.user_plan import Plan, PlanSource
from rankless.records.parallel_plan import ZERO_LEVELS, Recompute, ZeroLevel

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""What a script passes as `model=`."""
Optimizers = Optimizer | Sequence[Optimizer]
"""What a script passes as `optimizer=`."""
View = Literal["consistent", "whole", "mirrored"]
"""How a job sees several devices: as one device with whole tensors, in one program or, with `capture=False`, by plain
calls on every device; or as lists with one element per device."""


RandomSource = Literal["generator", "counter"]
"""The source of a job's random numbers: PyTorch's generator, or a function of a seed and an element's number."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How the gradients of a train job's calls become an optimizer step."""

    accumulate: int = 1
    """Calls per step."""
    clip_norm: float | None = None
    clip_value: float | None = None
    gradient_norm: bool = False
    check_finite: bool = False
    check_synchronized_every: int | None = None
    """Number of calls after which the models of all ranks are compared."""
    zero: ZeroLevel | None = None
    """What is divided between workers: the state of optimizers, also gradients, or also parameters."""
    offload: bool = False
    """Whether the workers keep what they hold of it in the memory of the host."""

    @property
    def measures_norm(self) -> bool:
        """Whether every step measures the norm of the whole gradient."""
        return self.gradient_norm or self.clip_norm is not None

    def validate(self) -> None:
        """Raise `ConfigError` for invalid values."""
        if not isinstance(self.accumulate, int) or isinstance(self.accumulate, bool) or self.accumulate < 1:
            raise ConfigError(
                expected="accumulate= as the number of calls per step, at least 1",
                found=f"accumulate={self.accumulate!r}",
                fix="pass an integer, or omit it for a step at each call",
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                expected="clip_norm= or clip_value=, because their order would change the result",
                found=f"clip_norm={self.clip_norm!r} and clip_value={self.clip_value!r}",
                fix="choose one",
            )
        if self.zero is not None and self.zero not in ZERO_LEVELS:
            raise ConfigError(
                expected=f"zero= as one of {', '.join(map(repr, ZERO_LEVELS))}",
                found=f"zero={self.zero!r}",
                fix="omit it to hold everything on every worker",
            )
        if not isinstance(self.offload, bool):
            raise ConfigError(expected="offload= as True or False", found=f"offload={self.offload!r}", fix="omit it")
        if self.offload and self.zero is None:
            raise ConfigError(
                expected="offload=True with zero=, which says what lies in the memory of the host",
                found="offload=True without zero=",
                fix='pass zero="optimizer", or omit offload=',
            )
        every = self.check_synchronized_every
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ConfigError(
                expected="check_synchronized_every= as a number of calls, from 1 up", found=every, fix="leave it away"
            )
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
                raise ConfigError(
                    expected=f"{name}= as a number above 0",
                    found=f"{name}={limit!r}",
                    fix="pass the largest norm (clip_norm=1.0) or the largest value (clip_value=0.5) to keep",
                )


@dataclass(frozen=True, kw_only=True)
class JobDefinition:
    """A function, the modules it may use, and the optimizers that make it a train job."""

    name: str
    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    optimizers: tuple[Optimizer, ...] = ()
    step_options: StepOptions = field(default_factory=StepOptions)
    view: View = "consistent"
    random: RandomSource = "generator"
    recompute: Recompute | None = None
    """What is computed again for gradients, to save memory."""
    plan: Plan | None = None
    """What the script says of its division; None for the default."""
    line: str

    @property
    def captured(self) -> bool:
        """Whether the job becomes one program on several workers."""
        return self.view == "consistent"

    def as_source(self) -> JobSource:
        """Return what a capture needs to know of the job."""
        return JobSource(
            name=self.name,
            function=self.function,
            modules=self.modules,
            trains=self.trains,
            line=self.line,
            draws_by_counter=self.draws_by_counter,
            recompute=self.recomputed_fraction,
            sequence_parallel=self.plan is not None and self.plan.sequence_parallel,
        )

    @property
    def draws_by_counter(self) -> bool:
        """Whether random operators draw by counter; see `rankless.compiler.ir.counter_distributions`."""
        return self.random == "counter"

    @property
    def recomputed_fraction(self) -> float:
        """How much of what the model's blocks compute is computed again for gradients, from 0 to 1."""
        return 1.0 if self.recompute == "blocks" else self.recompute or 0.0

    @property
    def check_synchronized_every(self) -> int | None:
        """Number of calls between two comparisons of all ranks' models; None compares them only after a change."""
        return self.step_options.check_synchronized_every

    @property
    def label(self) -> JobLabel:
        """What errors about the script's own calls say of the job."""
        return JobLabel(self.name, self.line, self.trains)

    @property
    def trains(self) -> bool:
        """Whether a call makes an optimizer step, or a part of one."""
        return bool(self.optimizers)

    @property
    def accumulates(self) -> bool:
        """Whether a step takes several calls."""
        return self.trains and self.step_options.accumulate > 1

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all modules and all optimizers, tied ones once."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        everywhere = [
            *(module.parameters() for module in self.modules.values()),
            *(group["params"] for group in groups),
        ]
        return list({id(item): item for some in everywhere for item in some}.values())

    def optimized_parameters(self, parameters: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the parameters of the optimizers, once each, in the order of the modules.

        `parameters` are those of `self.parameters()`, if the caller has them: finding them visits every module.
        """
        # A script clips `model.parameters()`: in another order the norm would round differently.
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        stepped = set(map(id, chain.from_iterable(group["params"] for group in groups)))
        known = self.parameters() if parameters is None else parameters
        return list(compress(known, map(stepped.__contains__, map(id, known))))

    def parameter_name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the script, as "model.head.weight"."""
        for name, module in self.modules.items():
            for path, known in module.named_parameters(prefix=name):
                if known is parameter:
                    return path
        return f"a parameter of shape {list(parameter.shape)}"

    def device(self, default: torch.device) -> torch.device:
        """Return the device of the first parameter or buffer, or `default` if there is none."""
        for module in self.modules.values():
            for tensor in chain(module.parameters(), module.buffers()):
                return tensor.device
        return default


@dataclass(frozen=True)
class CallResult:
    """The result of one call, before any optimizer step."""

    result: Any
    loss: Tensor | None = None
    """A train job's loss as one number."""
    weights: tuple[LossWeight, ...] = ()
    """The weights of the loss's terms, if several calls make one step."""
    parameters: Sequence[Tensor] = ()
    """The parameters of a train job, whose gradients the call has set."""
    is_elsewhere: bool = False
    """Whether another worker makes the call, and its step."""


def detach_leaf(leaf: Any) -> Any:
    """Return a leaf of a result without its autograd graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def as_function(function: Any) -> Any:
    """Return a module as a function that calls it, with its hooks; a function as it is."""
    if not isinstance(function, nn.Module):
        return function
    module = function

    @functools.wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    call.__name__ = type(module).__name__
    return call


def name_modules(model: Models) -> dict[str, nn.Module]:
    """Return the modules of a job by name: "model", "model_0" and so on, or the names given."""
    if isinstance(model, nn.Module):
        named = {"model": model}
    elif isinstance(model, Mapping):
        named = dict(model)
    else:
        named = {f"model_{index}": module for index, module in enumerate(model)}
    for name, module in named.items():
        if not isinstance(module, nn.Module) or not name.isidentifier():
            raise ConfigError(
                expected="model= as a torch.nn.Module, a list of modules, or a dict of modules by name",
                found=f"{type(module).__name__} under the name {name!r}",
                fix="pass modules; the job may read other objects from its closure",
            )
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise ConfigError(
                expected="model= as the model itself: the job runs it on all devices",
                found=f"{type(module).__name__} around it",
                fix="omit the wrapper, or pass and call its .module",
            )
    return named


def list_optimizers(optimizer: Optimizers | None) -> tuple[Optimizer, ...]:
    """Return the optimizers of a job in the order of their steps."""
    given = tuple(optimizer) if isinstance(optimizer, Iterable) else () if optimizer is None else (optimizer,)
    for item in given:
        if not isinstance(item, Optimizer):
            name = getattr(item, "__name__", "") if isinstance(item, type) else ""
            raise ConfigError(
                expected="optimizer= as a torch.optim optimizer, or a list of them",
                found=f"the class {name}" if name else type(item).__name__,
                fix=f"make one: {name}(model.parameters(), …)"
                if name
                else "pass the optimizer itself; schedulers stay in the script",
            )
    return given


def require_weighted_calls(job: JobDefinition) -> None:
    """Raise `ConfigError` for `accumulate=` on a job that is not captured."""
    if job.view == "whole" and job.accumulates:
        raise ConfigError(
            expected="accumulate=1 with capture=False, because only a captured loss says how calls are weighted",
            found=f"accumulate={job.step_options.accumulate} on job {job.name!r}",
            fix="omit accumulate=, and pass larger batches or loop over parts of the batch inside the job",
            where=job.line,
        )


def require_divisible_states(job: JobDefinition) -> None:
    """Raise `ConfigError` for `zero=` in a view, or with an optimizer, that cannot divide states."""
    if job.step_options.zero is None:
        return
    if not job.captured:
        raise ConfigError(
            expected="zero= on a job in the consistent view that is captured",
            found=f"zero={job.step_options.zero!r} on job {job.name!r} "
            + ("in the mirrored view" if job.view == "mirrored" else "with capture=False"),
            fix="omit zero=",
            where=job.line,
        )
    for optimizer in job.optimizers:
        require_divisible(optimizer, job=job.name, line=job.line)


def require_settings(job: JobDefinition) -> None:
    """Raise `ConfigError` for a `random=`, `recompute=` or `plan=` that the job cannot have."""
    require_random_source(job)
    require_recomputation(job)
    require_plan(job)


def require_random_source(job: JobDefinition) -> None:
    """Raise `ConfigError` for an unknown `random=`, or one that the job's view does not have."""
    if job.random not in get_args(RandomSource) or (job.view == "mirrored" and job.random != "generator"):
        raise ConfigError(
            expected='random="generator", or random="counter" in the consistent view and with capture=False',
            found=f"random={job.random!r}" + (" in the mirrored view" if job.view == "mirrored" else ""),
            fix="omit random= for the numbers of PyTorch's generator",
            where=job.line,
        )


def require_recomputation(job: JobDefinition) -> None:
    """Raise `ConfigError` for an invalid `recompute=`, or one on a job that is not captured or does not train."""
    given = job.recompute
    if given is None:
        return
    is_fraction = isinstance(given, int | float) and not isinstance(given, bool) and 0 < given <= 1
    if given != "blocks" and not is_fraction:
        raise ConfigError(
            expected='recompute="blocks", or a fraction above 0 and at most 1',
            found=f"recompute={given!r}",
            fix="omit it to keep everything that gradients need",
            where=job.line,
        )
    if not job.captured or not job.trains:
        kind = "in the mirrored view" if job.view == "mirrored" else "with capture=False"
        raise ConfigError(
            expected="recompute= on a train job in the consistent view that is captured",
            found=f"recompute={given!r} on job {job.name!r} " + ("without optimizer=" if job.captured else kind),
            fix="omit recompute=, and use torch.utils.checkpoint in the model" if job.trains else "omit recompute=",
            where=job.line,
        )


def make_plan(source: PlanSource | None, job: JobDefinition) -> Plan | None:
    """Return the plan of a job: the one that the script gives, or what its function returns for the job's models."""
    if callable(source) and not isinstance(source, type):  # the class Plan itself is refused below, as any other value
        return source(*job.modules.values())
    return cast("Plan | None", source)


def require_plan(job: JobDefinition) -> None:
    """Raise `ConfigError` for a `plan=` that is none, or one on a job that is not captured."""
    if job.plan is None:
        return
    if not isinstance(job.plan, Plan):
        raise ConfigError(
            expected="plan= as a rankless.Plan, or a function that returns one",
            found=f"plan={job.plan!r}",
            fix="omit it",
            where=job.line,
        )
    if not job.captured:
        raise ConfigError(
            expected="plan= on a job in the consistent view that is captured",
            found=f"plan= on job {job.name!r} "
            + ("in the mirrored view" if job.view == "mirrored" else "with capture=False"),
            fix="omit plan=",
            where=job.line,
        )


def require_optimizer(job: JobDefinition) -> None:
    """Raise `ConfigError` for step options on a job without an optimizer."""
    if not job.trains and job.step_options != StepOptions(check_synchronized_every=job.check_synchronized_every):
        raise ConfigError(
            expected="accumulate=, clip_norm=, clip_value=, gradient_norm= and check_finite= on a train job",
            found=f"job {job.name!r} without optimizer=, which makes no steps",
            fix="pass optimizer=, or omit these arguments",
        )
