"""What a job's function leaves behind: tensors that it keeps for later calls, and all that a failed capture changed.

Note [kept tensors]: a script may keep a mask in an attribute, a dict or an `lru_cache` at its first call. In a trace
this is a tensor of the trace, which no later call can use. So each pass begins with what the script had before. A kept
tensor that depends on nothing but constants is computed, and takes the place that the script gave it, as in a plain
run; the next passes find it there. One that depends on arguments, parameters or random numbers is refused.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rankless.compiler.ir.operator_origin import decode_origin
from rankless.compiler.tracing.recomputed_weights import find_recomputed_weights
from rankless.errors import CaptureError

OWN_TABLES = ("_parameters", "_buffers", "_modules")
"""What `side_effects` watches: a pass may not replace these."""
EXPECTED = "a job that keeps no tensors for later calls but those made of constants, such as masks"
BUFFERS = "._buffers"
FLAT_WEIGHTS = "_flat_weights"
"""The attribute of recurrent layers that lists their parameters."""
ABSENT = object()


@dataclass(frozen=True, eq=False)
class Holder:
    """A place of the script that may keep tensors: the attributes of a module, a dict, a list, or a closure's cell."""

    label: str
    container: Any
    is_of_module: bool = False

    def read(self) -> dict[Any, Any]:
        """Return what it holds by key."""
        if isinstance(self.container, list):
            return dict(enumerate(self.container))
        if isinstance(self.container, CellType):
            try:
                return {"": self.container.cell_contents}
            except ValueError:  # nothing has been assigned yet
                return {}
        # A class may make what it returns, as the table of activations in transformers makes modules.
        return dict(dict.items(self.container) if isinstance(self.container, dict) else self.container)

    def write(self, values: Mapping[Any, Any]) -> None:
        """Hold these values and no others."""
        if isinstance(self.container, list):
            self.container[:] = values.values()
        elif isinstance(self.container, CellType):
            if values:
                self.container.cell_contents = values[""]
            else:
                del self.container.cell_contents
        else:
            known = self.read()
            for key in known.keys() - values.keys():
                del self.container[key]
            for key, value in values.items():
                if known.get(key, ABSENT) is not value:
                    self.container[key] = value

    def describe(self, key: Any) -> str:
        """Return the name of one of its values."""
        if self.is_of_module or self.label == "global":
            return f"{self.label} {key}" if self.label == "global" else f"{self.label}.{key}"
        return self.label if isinstance(self.container, CellType) else f"{self.label}[{key!r}]"


@dataclass
class KeptTensors:
    """The tensors that a job's function keeps, in the passes of one capture."""

    holders: list[Holder]
    caches: list[Any]
    """Functions with a `functools.lru_cache`, whose values of a pass are dropped: the next call computes them again."""
    ignored: set[tuple[int, Any]]
    """What PyTorch's modules set anew in each forward pass: containers by identity, and keys."""
    found: dict[tuple[int, Any], tuple[Holder, Any, Any]] = field(default_factory=dict)
    """What the last pass has kept: holder, key and the value, computed."""
    applied: dict[tuple[int, Any], Any] = field(default_factory=dict)
    _changed: list[tuple[Holder, Any, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def observe_pass(self) -> Iterator[None]:
        """Within the context, one pass runs; at its end the script has what it had before."""
        before = [holder.read() for holder in self.holders]
        counts = [cache.cache_info().misses for cache in self.caches]
        try:
            yield
        finally:
            changed = [
                (holder, key, value, known)
                for holder, known in zip(self.holders, before, strict=True)
                for key, value in holder.read().items()
                if value is not known.get(key, ABSENT) and holds_traced(value)
                if (id(holder.container), key) not in self.ignored
                if not (holder.label.endswith(BUFFERS) and key in known)  # `side_effects` refuses it
            ]
            for holder, known in {id(holder): (holder, known) for holder, *_, known in changed}.values():
                kept = {key for place, key, *_ in changed if place is holder}
                now = {key: value for key, value in holder.read().items() if key not in kept}
                holder.write(now | {key: known[key] for key in kept if key in known})
            for cache, count in zip(self.caches, counts, strict=True):
                if cache.cache_info().misses != count:
                    cache.cache_clear()
        self._changed = [(holder, key, value) for holder, key, value, _ in changed]

    def compute(self) -> None:
        """Compute what the last pass has kept. Raises `CaptureError` if it depends on more than constants."""
        if get_proxy_mode() is not None:  # the passes without one make no graph
            self.found = {
                (id(holder), key): (holder, key, compute_kept(value, holder.describe(key)))
                for holder, key, value in self._changed
            }

    def apply(self) -> bool:
        """Give the script what it has kept in the first passes. Return whether there is anything."""
        for place, (holder, key, value) in self.found.items():
            holder.write(holder.read() | {key: value})
            self.applied[place] = value
        return bool(self.found)

    def require_stable(self) -> None:
        """Raise `CaptureError` if later passes keep other tensors than the first ones."""
        for place, (holder, key, value) in self.found.items():
            if place not in self.applied or not is_same_value(self.applied[place], value):
                raise CaptureError(
                    expected=EXPECTED,
                    found=f"{holder.describe(key)}, in which the job keeps another tensor at every call",
                    fix="make the tensor outside the job, or return it and keep it there",
                )


def find_kept(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> KeptTensors:
    """Return the places that a job may keep tensors in: of its modules, its function, and the modules' classes."""
    holders: list[Holder] = []
    functions = [function]
    for name, module in modules.items():
        for path, submodule in module.named_modules(prefix=name):
            holders.append(Holder(path, vars(submodule), is_of_module=True))
            holders += list_containers(f"{path}.", vars(submodule))
            holders.append(Holder(path + BUFFERS, submodule._buffers))
    submodules = [submodule for module in modules.values() for submodule in module.modules()]
    kinds = {type(submodule) for submodule in submodules}
    for kind in kinds:
        functions += [item for item in vars(kind).values() if callable(item)] + [kind.forward]
    caches = [item for item in functions if is_cache(item)]
    seen = set[int]()
    for item in map(find_function, functions):
        if item is None or (id(item) in seen):
            continue
        seen.add(id(item))
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            holder = Holder(name, cell)
            values = [(name, value) for value in holder.read().values()]
            holders += [holder, *list_containers("", dict(values))]
            caches += [value for _, value in values if is_cache(value)]
        if id(item.__globals__) not in seen and not item.__module__.startswith(("torch.", "rankless.")):
            seen.add(id(item.__globals__))
            holders += [Holder("global", item.__globals__), *list_containers("", item.__globals__)]
            caches += filter(is_cache, item.__globals__.values())
    ignored: set[tuple[int, Any]] = {(id(vars(submodule)), FLAT_WEIGHTS) for submodule in submodules}
    ignored |= {(id(vars(weight.module)), weight.name) for weight in find_recomputed_weights(submodules)}
    return KeptTensors(holders, list({id(item): item for item in caches}.values()), ignored)


def list_containers(prefix: str, values: Mapping[str, Any]) -> Iterable[Holder]:
    """Return the dicts and lists among values, by name."""
    return [
        Holder(f"{prefix}{key}", value)
        for key, value in values.items()
        if isinstance(value, dict | list) and key not in (*OWN_TABLES, FLAT_WEIGHTS) and not key.startswith("__")
    ]


def find_function(value: Any) -> FunctionType | None:
    """Return the Python function of a method, a partial call or a cached function; None for anything else."""
    for _ in range(8):
        if isinstance(value, FunctionType):
            return value
        value = (
            value.__func__
            if isinstance(value, MethodType)
            else getattr(value, "__wrapped__", None) or getattr(value, "func", None)
        )
    return None


def is_cache(value: Any) -> bool:
    """Return whether a value is a function with a `functools.lru_cache`."""
    return hasattr(value, "cache_info") and hasattr(value, "cache_clear") and hasattr(value, "__wrapped__")


def holds_traced(value: Any) -> bool:
    """Return whether a value is a tensor of a trace, or holds one."""
    if isinstance(value, tuple | list):
        return any(map(holds_traced, value))
    if isinstance(value, dict):
        return any(map(holds_traced, value.values()))
    return isinstance(value, FunctionalTensor | FakeTensor)


def compute_kept(value: Any, label: str) -> Any:
    """Return a kept value with real tensors in place of traced ones. Raises `CaptureError` if they depend on more."""

    def compute(tensor: Any) -> Any:
        if not isinstance(tensor, FunctionalTensor | FakeTensor):
            return tensor
        inner: Any = tensor
        if isinstance(tensor, FunctionalTensor):
            torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]  # public in PyTorch's own modes
            inner = torch._from_functional_tensor(tensor.elem)
        mode: Any = get_proxy_mode()
        slot: Any = get_proxy_slot(inner, mode.tracer, None)
        if slot is None or tensor.requires_grad:
            raise make_refusal(label, "")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return Constants(mode.tracer.root, label, slot.proxy.node).compute(slot.proxy.node)

    return pytree.tree_map(compute, value)


class Constants:
    """Computes nodes of a graph that depend on constants only."""

    def __init__(self, root: nn.Module, label: str, kept: fx.Node) -> None:
        self._root = root
        self._label = label
        self._line = decode_origin(kept.meta.get("stack_trace")).line
        self._values: dict[fx.Node, Any] = {}

    def compute(self, node: fx.Node) -> Any:
        """Return the value of a node. Raises `CaptureError` if it depends on more than constants."""
        if node in self._values:
            return self._values[node]
        tags = getattr(node.target, "tags", ())
        if node.op == "get_attr":
            value = getattr(self._root, str(node.target))
        elif node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.compute)
            value = node.target(*args, **kwargs)  # type: ignore[operator]  # a function, as its kind says
        else:
            raise make_refusal(self._label, self._line)
        if isinstance(value, FakeTensor | FunctionalTensor):
            raise make_refusal(self._label, "")
        self._values[node] = value
        return value


def make_refusal(label: str, line: str) -> CaptureError:
    """Return the error for a kept tensor that depends on more than constants."""
    return CaptureError(
        expected=EXPECTED,
        found=f"{label}, in which the job keeps a tensor computed from arguments, parameters or random numbers",
        fix="return the tensor from the job, and keep it there",
        where=line or None,
    )


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two kept values have equal tensors."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    with _disable_current_modes():
        return all(
            not isinstance(first, Tensor)
            or (isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second))
            for first, second in pairs
        )


@contextlib.contextmanager
def restore_after_failure(kept: KeptTensors, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """If the context fails, what the script and its modules hold is as before, and so are all random generators."""
    submodules = [submodule for module in modules.values() for submodule in module.modules()]
    tables = [
        Holder("", vars(submodule)[name])
        for submodule in submodules
        for name in OWN_TABLES
        if not isinstance(submodule, torch.jit.ScriptModule)
    ]
    holders = [*kept.holders, *tables]
    before = [holder.read() for holder in holders]
    python, arrays, dtype = random.getstate(), numpy.random.get_state(), torch.get_default_dtype()
    state = torch.get_rng_state()
    try:
        yield
    except BaseException as error:
        for holder, known in zip(holders, before, strict=True):
            # A trace that ends at a value is followed by others. What other threads do to globals stays then.
            if isinstance(error, Exception) or holder.is_of_module:
                holder.write(known)
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)
        raise
