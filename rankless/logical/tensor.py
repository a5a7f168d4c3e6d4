"""The logical tensor: the shape, dtype and device of a whole value, and this rank's part of it.

It stands above autograd. `__torch_function__` runs each PyTorch function on the parts, which are plain tensors with
gradients of their own; see Note [plans of calls]. A value that is whole on each rank is a plain tensor, so a logical
tensor holds rows, or a term of a sum.

Note [whole values]: what reads values (`item`, `print`, an index of a row) needs the whole. The first such call gathers
it from all ranks, and the tensor keeps it. If the script changes the whole in place, for example through `x[0]`, then
the rank's part gets the new values before it is used again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from rankless.compiler.ir.memory_order import find_memory_order
from rankless.logical.agreement import Agreement
from rankless.logical.call_plan import CallPlan, LogicalCall
from rankless.logical.call_trace import CallArguments, ChangedArgument, PlainLeaf, TensorKind
from rankless.logical.moves import move_with_gradient
from rankless.logical.plan_cache import PlanCache
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Placement, Replicate, Shard
from rankless.user_code import caller_line

AUTOCAST = ("cpu", "cuda")
"""The types of devices for which autocast may be on."""
CONTAINERS = (list, tuple, dict)
DISPATCH_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""The keys that PyTorch's dispatcher includes and excludes where no function runs."""


class LogicalView:
    """The ranks of a logical view, and the plans of the calls that its script has made.

    Args:
        mesh: The ranks. All of them divide batches.
        notify: Tells the user something.
    """

    def __init__(self, mesh: Mesh, notify: Callable[[str], None]) -> None:
        (self.axis,) = mesh.axes
        self.mesh = mesh
        self.notify = notify
        self.agreement = Agreement(mesh)
        self.plans = PlanCache(mesh, notify)
        self._notified_lines: set[str] = set()

    def notify_whole(self, function: Callable[..., Any]) -> None:
        """Tell the user, once for each line of the script, that a function runs on whole values."""
        line = caller_line()
        if line not in self._notified_lines:
            self._notified_lines.add(line)
            name = resolve_name(function) or getattr(function, "__name__", str(function))
            self.notify(
                f"{line}: {name} runs on the whole batch on every rank (correct, but not faster with more workers)"
            )


class DividedTensor(Tensor):
    """A whole value of which this rank holds a part.

    Attributes:
        local: The part: rows, or a term of a sum. Its gradient is this rank's part of the value's gradient.
        placement: How the value lies on the ranks: `Shard`, or `Partial` of a sum.
        ranks: The ranks.
    """

    local: Tensor
    placement: Placement
    ranks: LogicalView
    logical_shape: tuple[int, ...]
    _whole: tuple[Tensor, int, int] | None
    """The whole value, its version, and that of the part."""

    @staticmethod
    def __new__(
        cls: type["DividedTensor"], local: Tensor, placement: Placement, shape: tuple[int, ...], view: LogicalView
    ) -> "DividedTensor":
        """Create the wrapper, which has the whole value's shape and no storage."""
        wrapper = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        wrapper.local, wrapper.placement, wrapper.ranks = local, placement, view
        wrapper.logical_shape, wrapper._whole = shape, None
        return wrapper

    def __init__(self, *_: Any) -> None:
        pass

    def whole(self) -> Tensor:
        """Return the whole value as a plain tensor, whose gradient returns to the part. Collective."""
        self.refresh()
        needs_gradient = self.local.requires_grad and torch.is_grad_enabled()
        if self._whole is None or (needs_gradient and not self._whole[0].requires_grad):
            self.ranks.agreement.check(f"the whole value of a tensor {list(self.logical_shape)} of {self.dtype}")
            found = self._gather()
            self._whole = found, found._version, get_version(self.local)
        return self._whole[0]

    def _gather(self) -> Tensor:
        if torch.is_inference_mode_enabled():  # the whole needs a version
            with torch.inference_mode(mode=False), torch.no_grad():
                return self._gather()
        return move_with_gradient(self.local, self.ranks.axis, self.logical_shape, self.placement, Replicate())

    def refresh(self) -> None:
        """Give the part the values of the whole, if the script has changed this in place; see Note [whole values]."""
        if self._whole is None:
            return
        whole, version, version_of_part = self._whole
        if whole._version != version:
            axis, shape = self.ranks.axis, self.logical_shape
            moved = move_with_gradient(whole, axis, shape, Replicate(), self.placement)
            self.change(moved)
            self._whole = whole, whole._version, get_version(self.local)
        elif get_version(self.local) != version_of_part:
            self._whole = None

    def change(self, value: Tensor) -> None:
        """Change the value in place, to one whose part on this rank is given."""
        if isinstance(self.placement, Shard):
            self.local.copy_(value)
        else:
            self.local, self._whole = value, None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function called from Python."""
        handler = HANDLERS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            return call(func, args, kwargs or {}) if handler is None else handler(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack the class method
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator called from C++, which bypasses `__torch_function__`, above autograd again."""
        handler = HANDLERS.get(func)
        with torch._C._ForceDispatchKeyGuard(*DISPATCH_KEYS):
            return call(func, args, kwargs or {}) if handler is None else handler(*args, **(kwargs or {}))


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Functions that are no operations on values: they describe a tensor, read it, or differentiate."""


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of logical tensors returns: logical tensors, or plain ones for whole values."""
    leaves, structure = flatten(args, kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    view = refresh_all(tensors)
    plan = look_up(function, leaves, structure, view)
    if plan is None:
        result = call_with_whole(function, range(len(tensors)), tensors, (leaves, structure))
        view.notify_whole(function)
        return result
    if plan.gathered:
        if any(isinstance(getattr(tensors[number], "placement", None), Shard) for number in plan.gathered):
            view.notify_whole(function)
        return call_with_whole(function, plan.gathered, tensors, (leaves, structure))
    parts = [tensor.local if isinstance(tensor, DividedTensor) else tensor for tensor in tensors]
    if plan.kind == "direct":
        given, named = fill(leaves, structure, parts)
        found = function(*given, **named)
        results = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        return rebuild(plan, results, tensors, view)
    for number in plan.changed:
        parts[number] = parts[number].clone()  # the change must not reach what the backward pass keeps
    values = list(plan.run(parts))
    count = len(values) - len(plan.changed)
    for number, value in zip(plan.changed, values[count:], strict=True):
        change(tensors[number], value)
    remaining = iter(values[:count])
    marked = [leaf for leaf in plan.leaves if not isinstance(leaf, PlainLeaf)]
    return rebuild(plan, [next(remaining) if leaf is None else parts[leaf.number] for leaf in marked], tensors, view)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of arguments, and what puts them together again; most calls have no nested arguments."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if isinstance(leaf, CONTAINERS):
            return pytree.tree_flatten((args, kwargs))
    return leaves, (len(args), tuple(kwargs))


def fill(leaves: Sequence[Any], structure: Any, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return positional and keyword arguments with other tensors."""
    remaining = iter(tensors)
    filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if isinstance(structure, tuple):
        count, names = structure
        return filled[:count], dict(zip(names, filled[count:], strict=True))
    found: tuple[Sequence[Any], dict[str, Any]] = pytree.tree_unflatten(filled, structure)
    return found


def refresh_all(tensors: Sequence[Tensor]) -> LogicalView:
    """Refresh the logical tensors among some, and return their view."""
    view: LogicalView | None = None
    for tensor in tensors:
        if isinstance(tensor, DividedTensor):
            view = tensor.ranks
            if tensor._whole is not None:
                tensor.refresh()
    assert view is not None
    return view


def look_up(function: Callable[..., Any], leaves: Sequence[Any], structure: Any, view: LogicalView) -> CallPlan | None:
    """Return the plan of a call; None if it runs on whole values."""
    modes = get_modes()
    signature = (function, modes, structure, *map(describe_leaf, leaves))
    try:
        known = view.plans.recent.get(signature)
        if known is not None or signature in view.plans.recent:
            return known
    except TypeError:  # an argument has no hash
        return None
    args, kwargs = fill(leaves, structure, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
    flat, spec = pytree.tree_flatten((tuple(args), kwargs))
    arguments = CallArguments(
        leaves=tuple(make_kind(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat), structure=spec
    )
    placements = tuple(getattr(leaf, "placement", Replicate()) for leaf in flat if isinstance(leaf, Tensor))
    call = LogicalCall(function=function, modes=modes, arguments=arguments, placements=placements)
    return view.plans.find(signature, call)


def get_modes() -> Any:
    """Return PyTorch's modes on which a trace depends."""
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in AUTOCAST if torch.is_autocast_enabled(kind))
    return torch.is_grad_enabled(), torch.get_default_dtype(), autocast


def describe_leaf(leaf: Any) -> Any:
    """Return what the plan of a call depends on in one argument."""
    kind = type(leaf)
    if kind is DividedTensor:
        local, placement = leaf.local, leaf.placement
        lengths = placement.lengths if isinstance(placement, Shard) else None
        return leaf.logical_shape, placement, lengths, local.dtype, local.device, local.requires_grad, local.stride()
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride()
    if kind is slice:
        return slice, *map(describe_leaf, (leaf.start, leaf.stop, leaf.step))
    return kind, leaf


def make_kind(tensor: Tensor) -> TensorKind:
    """Describe a tensor argument to a trace."""
    local = tensor.local if isinstance(tensor, DividedTensor) else tensor
    shape = tensor.logical_shape if isinstance(tensor, DividedTensor) else tuple(tensor.shape)
    order = find_memory_order(local.shape, local.stride())
    return TensorKind(shape, order, local.dtype, local.device, local.requires_grad)


def call_with_whole(
    function: Callable[..., Any], numbers: Sequence[int], tensors: Sequence[Tensor], given: tuple[Sequence[Any], Any]
) -> Any:
    """Return a function's result with whole values in place of some logical tensors; it may change these in place.

    Args:
        function: The function.
        numbers: Which of `tensors`.
        tensors: The tensor arguments.
        given: All arguments as leaves, and their structure.
    """
    wholes = list(tensors)
    for number in numbers:
        tensor = tensors[number]
        if isinstance(tensor, DividedTensor):
            wholes[number] = tensor.whole()
    args, kwargs = fill(*given, wholes)
    if any(isinstance(tensor, DividedTensor) for tensor in wholes):
        result = call(function, tuple(args), kwargs)
    else:
        result = function(*args, **kwargs)
    same = {id(whole): tensor for whole, tensor in zip(wholes, tensors, strict=True) if whole is not tensor}
    return pytree.tree_map_only(Tensor, lambda leaf: same.get(id(leaf), leaf), result) if same else result


def change(tensor: Tensor, value: Tensor) -> None:
    """Change a tensor argument in place."""
    if isinstance(tensor, DividedTensor):
        tensor.change(value)
    else:
        tensor.copy_(value)


def rebuild(plan: CallPlan, results: Sequence[Tensor], tensors: Sequence[Tensor], view: LogicalView) -> Any:
    """Return a call's result with logical tensors in place of this rank's parts.

    Args:
        plan: The plan of the call.
        results: The tensors of the result, also those that are arguments.
        tensors: The tensor arguments.
        view: The ranks.
    """
    remaining, numbers = iter(results), iter(range(len(plan.placements)))
    leaves = []
    for leaf in plan.leaves:
        if isinstance(leaf, ChangedArgument):
            next(remaining)
            tensor = tensors[leaf.number]
            if isinstance(tensor, DividedTensor):
                tensor._whole = None  # in inference mode no version shows the change
            leaves.append(tensor)
        elif leaf is None:
            result, number = next(remaining), next(numbers)
            leaves.append(wrap(result, plan.placements[number], plan.shapes[number], tensors, view))
        else:
            leaves.append(leaf.value)
    if len(leaves) == 1 and plan.structure.is_leaf():
        return leaves[0]
    return pytree.tree_unflatten(leaves, plan.structure)


def wrap(
    result: Tensor, placement: Placement, shape: tuple[int, ...], tensors: Sequence[Tensor], view: LogicalView
) -> Tensor:
    """Return a result as a logical tensor; the argument itself if it is one, and a whole value as it is."""
    if isinstance(placement, Replicate):
        return result
    for tensor in tensors:
        if isinstance(tensor, DividedTensor) and tensor.local is result:
            return tensor
    return DividedTensor(result, placement, shape, view)


def get_version(part: Tensor) -> int:
    """Return how often a part was changed in place; always -1 for a tensor of inference mode, which does not count."""
    return -1 if part.is_inference() else part._version


def shard_rows(rows: Tensor, lengths: tuple[int, ...], view: LogicalView) -> DividedTensor:
    """Return a batch of which this rank has these rows; `lengths` has the number of rows of each rank."""
    return DividedTensor(rows, Shard(0, lengths), (sum(lengths), *rows.shape[1:]), view)
