"""PyTorch's random operators in terms of counter-based draws, for captured programs and for eager code.

Other random operators, such as `randperm`, `multinomial` and `poisson`, draw whole tensors from PyTorch's generator,
which a call of the job has seeded equally on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from rankless.compiler.ir.counter_distributions import draw, draw_key
from rankless.compiler.ir.local_kernels import apply_dropout
from rankless.compiler.ir.tensor_parts import Part

aten = torch.ops.aten

MAX_RANDOM = {torch.bool: 2, torch.float16: 2**11 + 1, torch.bfloat16: 2**8 + 1, torch.float32: 2**24 + 1}
"""What `random_()` stays below for dtypes that are not integers; 2**53 + 1 for float64."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class RandomCall:
    """A call of a random operator: the distribution and its parameters."""

    distribution: str
    parameters: tuple[Any, ...]


Reader = Callable[[Arguments, torch.dtype], RandomCall]
"""Finds what a call draws, from its arguments and the dtype of its result."""


def read_bernoulli(found: Arguments, _dtype: torch.dtype) -> RandomCall:
    """Return the distribution of `bernoulli`, whose probabilities are its input if it has no others."""
    return RandomCall("bernoulli", (found.get("p", found["self"]),))


def read_integers(found: Arguments, _dtype: torch.dtype) -> RandomCall:
    """Return the distribution of `randint`."""
    return RandomCall("integers", (found.get("low", 0), found["high"]))


def read_random(found: Arguments, dtype: torch.dtype) -> RandomCall:
    """Return the distribution of `random_`, whose limits depend on the dtype."""
    if dtype in MAX_RANDOM or dtype.is_floating_point:
        limit = MAX_RANDOM.get(dtype, 2**53 + 1)
    else:
        limit = torch.iinfo(dtype).max + 1
    upper = found.get("to")
    return RandomCall("integers", (found.get("from", 0), limit if upper is None else upper))


def read_parameters(distribution: str, *names: str) -> Reader:
    """Return a function that finds the parameters of a distribution among an operator's arguments."""
    return lambda found, _dtype: RandomCall(distribution, tuple(found[name] for name in names))


READERS: dict[str, Reader] = {
    "bernoulli": read_bernoulli,
    "rand": lambda _found, _dtype: RandomCall("uniform", (0.0, 1.0)),
    "randn": lambda _found, _dtype: RandomCall("normal", (0.0, 1.0)),
    "randint": read_integers,
    "random": read_random,
    "uniform": read_parameters("uniform", "from", "to"),
    "normal": read_parameters("normal", "mean", "std"),
    "exponential": read_parameters("exponential", "lambd"),
    "geometric": read_parameters("geometric", "p"),
    "cauchy": read_parameters("cauchy", "median", "sigma"),
    "log_normal": read_parameters("log_normal", "mean", "std"),
}
"""What an operator draws, by its name without `_`, `_like` and `_functional`."""


def find_reader(operator: Any) -> Reader | None:
    """Return what reads the calls of a random operator that is drawn by counter; None for any other operator."""
    if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
        return None
    name = operator._schema.name.removeprefix("aten::")
    if operator._overloadname.startswith("Tensor") and name == "randint_like":
        return None
    return READERS.get(name.removesuffix("_").removesuffix("_like").removesuffix("_functional"))


def bind_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema, with defaults."""
    found = {}
    for position, described in enumerate(operator._schema.arguments):
        if position < len(args):
            found[described.name] = args[position]
        elif described.name in kwargs:
            found[described.name] = kwargs[described.name]
        elif described.has_default_value():
            found[described.name] = described.default_value
    return found


def mark_counter_draws(graph: fx.Graph) -> None:
    """Let the random operators of a captured graph draw by counter."""
    for node in graph.nodes:
        is_drawn = node.target is aten.native_dropout.default or find_reader(node.target) is not None
        if is_drawn and "generator" not in node.meta:
            node.meta["counter"] = True


class CounterRandomMode(TorchDispatchMode):
    """Within the context, random operators of eager code draw whole tensors by counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch declares no types here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; draw its numbers by counter if it is random and uses PyTorch's default generator."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is aten.native_dropout.default:
            return run_dropout(*args, **kwargs)
        reader = find_reader(func)
        if reader is None:
            return func(*args, **kwargs)
        found = bind_arguments(func, args, kwargs)
        like = find_example(found)
        device = torch.device(found.get("device") or ("cpu" if like is None else like.device))
        if found.get("generator") is not None or device.type == "meta":
            return func(*args, **kwargs)
        if "size" in found:
            shape: Sequence[int] = tuple(found["size"])
        else:
            candidates = [found.get(name) for name in ("self", "mean", "std")]
            shape = torch.broadcast_shapes(*(item.shape for item in candidates if isinstance(item, Tensor)))
        dtype = found.get("dtype")
        if not isinstance(dtype, torch.dtype):
            default = torch.int64 if reader is read_integers else torch.get_default_dtype()
            dtype = default if like is None else like.dtype
        call = reader(found, dtype)
        values = draw(draw_key(shape), call.distribution, call.parameters, (shape, dtype, device), ())
        return place_values(func, found, values)


def find_example(found: Arguments) -> Tensor | None:
    """Return the argument that decides dtype and device of the result."""
    candidates = [found.get(name) for name in ("out", "self", "mean", "std")]
    return next((item for item in candidates if isinstance(item, Tensor)), None)


def place_values(operator: Any, found: Arguments, values: Tensor) -> Tensor:
    """Return an operator's result, which may be one of its arguments or lie in memory as one does."""
    target, like = found.get("out"), found.get("self")
    if target is not None:
        if target.shape != values.shape:
            target.resize_(values.shape)
    elif operator._schema.name.endswith("_"):
        target = like
    elif isinstance(like, Tensor):
        memory_format = found.get("memory_format") or torch.preserve_format
        target = torch.empty_like(like, dtype=values.dtype, device=values.device, memory_format=memory_format)
    if target is None:
        return values
    copied: Tensor = target.copy_(values)
    return copied


def run_dropout(x: Tensor, probability: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Compute `native_dropout` with a mask that is drawn by counter."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool)
    mask.copy_(draw_mask(draw_mask_key(x.shape, probability), probability, (x.shape, x.device), ()))
    return apply_dropout(x, mask, probability), mask


def draw_mask_key(shape: Sequence[int], probability: float) -> int:
    """Return the key of a dropout mask. Dropout that drops everything draws nothing, in PyTorch too."""
    return 0 if probability == 1 else draw_key(shape)


def draw_mask(
    key: int,
    probability: float,
    value: tuple[Sequence[int], torch.device],
    parts: Sequence[Part],
    order: Sequence[int] | None = None,
) -> Tensor:
    """Return a rank's part of the mask of the elements that dropout keeps; see `counter_distributions.draw`."""
    shape, device = value
    return draw(key, "bernoulli", (1 - probability,), (shape, torch.bool, device), parts, order)
