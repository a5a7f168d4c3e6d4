"""The logical tensor: the shape, dtype and device of a whole value, and this rank's part of it.

It stands above autograd. `__torch_function__` runs each PyTorch function on the parts, which are plain tensors with
gradients of their own; see Note [plans of calls]. A value that is whole on each rank is a plain tensor, so a logical
tensor holds rows, or a term of a sum.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from rankless.compiler.ir.memory_order import find_memory_order
from rankless.logical_view.agreement import RankAgreement
from rankless.logical_view.call_observers import OBSERVERS, READ, MoveReason, name_function, send_call
from rankless.logical_view.call_plan import OF_PART, CallPlan, LogicalCall
from rankless.logical_view.gathered_values import GatheredWhole, GatheredWholes, get_version
from rankless.logical_view.gradient_shards import GradientShards
from rankless.logical_view.plan_cache import ObservedPlans, PlanCache
from rankless.logical_view.redistribution import find_gradient_placement, move_with_gradient
from rankless.logical_view.trace_call_to_program import CallArguments, ChangedArgument, PlainLeaf, TensorKind
from rankless.ownership.partitioned_tensor import CallsWithWholes, call_with_wholes
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard, split_lengths
from rankless.records.parallel_plan import ZeroLevel
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
        self.agreement = RankAgreement(mesh)
        self.zero: ZeroLevel | None = None
        """The training state that is divided besides batches: that of optimizers, or also gradients."""
        self.plans = (ObservedPlans if OBSERVERS else PlanCache)(mesh, notify)
        self.wholes = GatheredWholes(self.axis)
        self.batch_rows = 0
        """The number of rows of the present batch; 0 if there is none."""
        self.shards = GradientShards(self.axis, self.agreement.check)
        self._layouts: WeakValueDictionary[Any, DividedLayout] = WeakValueDictionary()
        self._notified_lines: set[str] = set()

    def find_layout(
        self, local: Tensor, placement: Placement, shape: tuple[int, ...], order: Any = OF_PART
    ) -> "DividedLayout":
        """Return the layout of a value of which this rank has a part; see `DividedLayout` for `order`."""
        kind, lengths = (local.dtype, local.device), placement.lengths if isinstance(placement, Shard) else None
        known = self._layouts.get((shape, placement, lengths, kind, order))
        if known is None:
            known = DividedLayout(shape, placement, kind, self)
            known.order = order
            self._layouts[shape, placement, lengths, kind, order] = known
        return known

    def notify_whole(self, function: Callable[..., Any], reason: str = "") -> None:
        """Tell the user, once for each line of the script, that a function runs on whole values.

        Args:
            function: The function.
            reason: Why, for observers; empty if they know it from `plans`.
        """
        if reason:
            send_call(function, "whole", reason)
        line = caller_line()
        if line not in self._notified_lines:
            self._notified_lines.add(line)
            self.notify(
                f"{line}: {name_function(function)} runs on the whole batch on every rank (correct, but not faster "
                "with more workers)"
            )


class DividedLayout:
    """How a logical value lies on the ranks. There is one object for each layout, so that plans are found quickly.

    Args:
        shape: The logical shape.
        placement: `Shard`, or `Partial` of a sum.
        kind: Its dtype and device.
        ranks: The ranks.

    Attributes:
        order: The order of the dims of the whole in memory, as `find_memory_order` returns it; or `OF_PART`, if the
            strides of each part show it. Those of a part of one row do not.
    """

    __slots__ = ("__weakref__", "device", "dtype", "order", "placement", "ranks", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        placement: Placement,
        kind: tuple[torch.dtype, torch.device],
        ranks: LogicalView,
    ) -> None:
        self.shape = shape
        self.placement = placement
        self.dtype, self.device = kind
        self.ranks = ranks
        self.order: Any = OF_PART


class DividedTensor(Tensor):
    """A whole value of which this rank holds a part.

    Attributes:
        local: The part: rows, or a term of a sum. Its gradient is this rank's part of the value's gradient.
        divided_as: How the value lies on the ranks.
    """

    local: Tensor
    divided_as: DividedLayout
    _whole: tuple[Tensor, GatheredWhole] | None
    """The whole value, and what is known of it."""

    @staticmethod
    def __new__(
        cls: type["DividedTensor"], local: Tensor, placement: Placement, shape: tuple[int, ...], view: LogicalView
    ) -> "DividedTensor":
        """Create the wrapper, which has the whole value's shape and no storage."""
        return make_divided(local, view.find_layout(local, placement, shape))

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def placement(self) -> Placement:
        """How the value lies on the ranks: `Shard`, or `Partial` of a sum."""
        return self.divided_as.placement

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""
        return self.divided_as.shape

    @property
    def ranks(self) -> LogicalView:
        """The ranks."""
        return self.divided_as.ranks

    def whole(self, reason: MoveReason = READ) -> Tensor:
        """Return the whole value as a plain tensor, whose gradient returns to the part. Collective.

        Args:
            reason: Why it is needed, for observers.
        """
        self.refresh()
        needs_gradient = self.local.requires_grad and torch.is_grad_enabled()
        if self._whole is None or (needs_gradient and not self._whole[0].requires_grad):
            self.ranks.agreement.check(f"the whole value of a tensor {list(self.logical_shape)} of {self.dtype}")
            known = GatheredWhole(self.local, self.ranks.axis, self.logical_shape, self.placement)
            self._whole = known.gather(reason), known
            self.ranks.wholes.add(known, self.local)
        return self._whole[0]

    def refresh(self) -> None:
        """Give the part what the script has changed in place of the whole; see Note [whole values]."""
        self.ranks.wholes.take_changes(self.local)
        if self._whole is None:
            return
        value, known = self._whole
        if tuple(value.shape) != self.logical_shape:  # as by `resize_`
            self.become(divide_whole(value, self.ranks))
        elif known.is_stale:
            self._whole = None

    def take_part(self) -> Tensor:
        """Return this rank's part, with what the script has changed in place of the whole."""
        self.refresh()
        return self.local

    def note_change(self) -> None:
        """Note that the part has changed in place. Collective if whole values that share its memory have views."""
        self.ranks.wholes.note_change(self.local)

    def note_view(self, holder: Any = None) -> None:
        """Note that the script has a view of the whole value, in PyTorch or NumPy.

        Args:
            holder: The tensor that holds the memory of an array.
        """
        if self._whole is not None:
            value, known = self._whole
            self.ranks.wholes.note_views(known, value)
            if isinstance(holder, Tensor):
                holder.gathered = self._whole  # type: ignore[attr-defined]

    def become(self, other: "DividedTensor") -> None:
        """Take the shape and the part of another value, as after `transpose_`."""
        with torch._C.DisableTorchFunctionSubclass():
            SET_DATA(self, other)
        self.local, self.divided_as, self._whole = other.local, other.divided_as, None

    def change(self, value: Tensor) -> None:
        """Change the value in place, to one whose part on this rank is given."""
        self.local.copy_(value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function called from Python."""
        if len(types) > 1 and any(issubclass(kind, CallsWithWholes) for kind in types):
            return call_with_wholes(func, args, kwargs or {})  # which calls this again
        handler = HANDLERS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            return call(func, args, kwargs or {}) if handler is None else handler(*args, **kwargs or {})

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
            return call(func, args, kwargs or {}) if handler is None else handler(*args, **kwargs or {})


UNKNOWN: Any = object()
NO_HASH: list[Any] = []
SET_DATA = vars(torch._C.TensorBase)["data"].__set__
IN_TRANSFORM: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost of the transforms of `torch.func` that run, or None."""
HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Functions that are no operations on values: they describe a tensor, read it, or differentiate."""


def make_divided(local: Tensor, layout: DividedLayout) -> DividedTensor:
    """Return a logical tensor of which this rank has a part."""
    wrapper = Tensor._make_wrapper_subclass(DividedTensor, layout.shape, dtype=layout.dtype, device=layout.device)
    wrapper.local, wrapper.divided_as, wrapper._whole = local, layout, None
    if local.requires_grad and local.is_leaf:
        mark_part(local)
    return wrapper


def mark_part(local: Tensor) -> None:
    """Mark a leaf as a part of a logical tensor: its gradient is no partial sum, as that of a plain tensor is."""
    local.is_part = True  # type: ignore[attr-defined]


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a function of logical tensors returns: logical tensors, or plain ones for whole values."""
    if IN_TRANSFORM() is not None:
        return call_in_transform(function, args, kwargs)
    if kwargs.get("requires_grad"):  # a new leaf, as of `randn_like`, which no program could return
        made = call(function, args, kwargs | {"requires_grad": False})
        (made.local if type(made) is DividedTensor else made).requires_grad_()
        return make_divided(made.local, made.divided_as) if type(made) is DividedTensor else made
    tensors: list[Tensor] = []
    signature: list[Any] = [function, *get_modes()]
    given = describe(args, signature, tensors)
    if kwargs:
        signature.append(tuple(kwargs))
        given_by_name = dict(zip(kwargs, describe(kwargs.values(), signature, tensors), strict=True))
    else:
        given_by_name = kwargs
    for tensor in tensors:
        if type(tensor) is DividedTensor:
            view = tensor.divided_as.ranks
            break
    is_forward_mode = forward_ad._current_level >= 0  # for which Rankless's operators have no formulas
    plan = None if is_forward_mode else look_up(tuple(signature), (function, args, kwargs), tensors, view)
    changed = () if plan is None else plan.changed  # the memory of `torch.empty` differs between ranks
    for number, tensor in enumerate(tensors):
        is_new = type(tensor) is Tensor and not tensor.requires_grad and get_version(tensor) == 0
        if is_new and number not in changed and tensor is not kwargs.get("out"):
            view.agreement.note_tensor(tensor, function)  # new data of the script, as noise
    if plan is None:
        result = call_with_whole(function, range(len(tensors)), tensors, (args, kwargs))
        view.notify_whole(function, "it is differentiated forwards" if is_forward_mode else "")
        return result
    view.agreement.count_call(plan.text, plan.digest)
    if plan.gathered:
        if any(isinstance(getattr(tensors[number], "placement", None), Shard) for number in plan.gathered):
            view.notify_whole(function)
        return call_with_whole(function, plan.gathered, tensors, (args, kwargs))
    if plan.kind == "direct":
        found = function(*given, **given_by_name)
        if plan.is_one_tensor:
            return wrap(plan, 0, found, tensors, view)
        for number in plan.changed:
            note_change(plan, number, tensors[number], tensors[number])
        return rebuild(plan, [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)], tensors, view)
    return call_program(plan, tensors, view)


def call_program(plan: CallPlan, tensors: Sequence[Tensor], view: LogicalView) -> Any:
    """Return the result of a call whose programs run in place of its function."""
    parts = [tensor.local if type(tensor) is DividedTensor else tensor for tensor in tensors]
    if plan.kind == "generated" and plan.is_one_tensor:
        (result,) = plan.run_forward(parts)
        return wrap(plan, 0, result, tensors, view)
    for number in plan.changed:
        parts[number] = parts[number].clone()  # the change must not reach what the backward pass keeps
    layouts = [tensor.divided_as if type(tensor) is DividedTensor else None for tensor in tensors]
    values = list(plan.run(parts, partial(differentiate_again, plan, layouts, view)))
    count = len(values) - len(plan.changed)
    for number, value in zip(plan.changed, values[count:], strict=True):
        note_change(plan, number, tensors[number], value)
    remaining = iter(values[:count])
    marked = [leaf for leaf in plan.leaves if not isinstance(leaf, PlainLeaf)]
    return rebuild(plan, [next(remaining) if leaf is None else parts[leaf.number] for leaf in marked], tensors, view)


def describe(leaves: Iterable[Any], signature: list[Any], tensors: list[Tensor]) -> list[Any]:
    """Return arguments with this rank's parts in place of logical tensors.

    Args:
        leaves: The arguments.
        signature: Gets what the plan of the call depends on.
        tensors: Gets the tensors among the arguments.
    """
    given = []
    for leaf in leaves:
        kind = type(leaf)
        if kind is DividedTensor:
            if leaf._whole is not None or leaf.divided_as.ranks.wholes.has_views:
                leaf.refresh()
            local = leaf.local
            signature += (leaf.divided_as, local.requires_grad, local.stride())
            tensors.append(leaf)
            given.append(local)
        elif kind is float or kind is int:
            signature += (kind, leaf)
            given.append(leaf)
        elif kind is Parameter or kind is Tensor or isinstance(leaf, Tensor):
            if leaf.layout is torch.strided:
                signature += (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride())
            else:
                signature.append(NO_HASH)  # no plan takes it: the call runs on whole values
            tensors.append(leaf)
            given.append(leaf)
        elif kind is tuple or kind is list:
            signature += (kind, len(leaf))
            given.append(kind(describe(leaf, signature, tensors)))
        elif isinstance(leaf, CONTAINERS):
            inner, structure = pytree.tree_flatten(leaf)
            signature.append(structure)
            given.append(pytree.tree_unflatten(describe(inner, signature, tensors), structure))
        elif kind is slice:
            signature.append(slice)
            describe((leaf.start, leaf.stop, leaf.step), signature, tensors)
            given.append(leaf)
        else:
            signature += (kind, leaf)
            given.append(leaf)
    return given


def fill(given: tuple[Sequence[Any], dict[str, Any]], tensors: Iterable[Any]) -> Any:
    """Return positional and keyword arguments with others in place of tensors."""
    remaining = iter(tensors)
    return pytree.tree_map_only(Tensor, lambda _: next(remaining), (tuple(given[0]), given[1]))


def look_up(signature: Any, called: Any, tensors: Sequence[Tensor], view: LogicalView) -> CallPlan | None:
    """Return the plan of a call; None if it runs on whole values.

    Args:
        signature: What the plan depends on.
        called: The function and its arguments.
        tensors: The tensors among these.
        view: The ranks.
    """
    try:
        known = view.plans.recent.get(signature)
        if known is not None or signature in view.plans.recent:
            return known
    except TypeError:  # an argument has no hash
        send_call(called[0], "whole", "an argument is sparse, or no value that can be compared")
        return None
    function, *given = called
    flat, structure = pytree.tree_flatten(fill(given, map(make_kind, tensors)))
    placements = tuple(getattr(tensor, "placement", Replicate()) for tensor in tensors)
    arguments = CallArguments(leaves=tuple(flat), structure=structure)
    call = LogicalCall(function=function, modes=signature[1:4], arguments=arguments, placements=placements)
    return view.plans.find(signature, call)


def differentiate_again(
    plan: CallPlan,
    layouts: Sequence[DividedLayout | None],
    view: LogicalView,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of a call's arguments as functions of its arguments and of the gradients of its results.

    Args:
        plan: The plan, a pair.
        layouts: Those of the tensor arguments; None for plain tensors.
        view: The ranks.
        values: This rank's parts of the arguments that `plan.again` takes, then those of draws.
        gradients: Those of the results, as `plan.backward` takes them.
    """
    again = plan.again
    assert again is not None
    given: list[Tensor] = []
    for value, number in zip(values, again.arguments, strict=False):
        layout = layouts[number]
        given.append(value if layout is None else make_divided(value, layout))
    results = [(plan.placements[number], plan.shapes[number]) for number in plan.differentiated]
    places = [(find_gradient_placement(placement), shape) for placement, shape in results]
    places += zip(again.placements, again.shapes, strict=True)
    for value, (placement, shape) in zip((*gradients, *values[len(given) :]), places, strict=True):
        given.append(value if isinstance(placement, Replicate) else DividedTensor(value, placement, shape, view))
    is_divided = any(type(value) is DividedTensor for value in given)
    found = call(again.function, given, {}) if is_divided else again.function(*given)
    parts = []
    for gradient, number in zip(found, plan.gradients, strict=True):
        layout = layouts[number]
        target = find_gradient_placement(Replicate() if layout is None else layout.placement)
        before = gradient.placement if isinstance(gradient, DividedTensor) else Replicate()
        local = gradient.local if isinstance(gradient, DividedTensor) else gradient
        parts.append(move_with_gradient(local, view.axis, tuple(gradient.shape), before, target))
    return parts


def get_modes() -> Any:
    """Return PyTorch's modes on which a trace depends."""
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in AUTOCAST if torch.is_autocast_enabled(kind))
    return torch.is_grad_enabled(), torch.get_default_dtype(), autocast


def make_kind(tensor: Tensor) -> TensorKind:
    """Describe a tensor argument to a trace."""
    local = tensor.local if isinstance(tensor, DividedTensor) else tensor
    shape = tensor.logical_shape if isinstance(tensor, DividedTensor) else tuple(tensor.shape)
    order = tensor.divided_as.order if isinstance(tensor, DividedTensor) else OF_PART
    if order is OF_PART:
        order = find_memory_order(local.shape, local.stride())
    return TensorKind(shape, order, local.dtype, local.device, local.requires_grad)


def call_with_whole(
    function: Callable[..., Any],
    numbers: Sequence[int],
    tensors: Sequence[Tensor],
    given: tuple[Sequence[Any], dict[str, Any]],
) -> Any:
    """Return a function's result with whole values in place of some logical tensors; it may change these in place.

    Args:
        function: The function.
        numbers: Which of `tensors`.
        tensors: The tensor arguments.
        given: The positional and the keyword arguments.
    """
    wholes, reason = list(tensors), MoveReason("input", "input of", function)
    for number in numbers:
        tensor = tensors[number]
        if isinstance(tensor, DividedTensor):
            wholes[number] = tensor.whole(reason)
    args, kwargs = fill(given, wholes)
    if any(isinstance(tensor, DividedTensor) for tensor in wholes):
        result = call(function, args, kwargs)
    else:
        result = function(*args, **kwargs)
    for leaf in pytree.tree_leaves(result):
        for whole, tensor in zip(wholes, tensors, strict=True):
            if whole is not tensor and isinstance(leaf, Tensor) and shares_memory(leaf, whole):
                tensor.note_view()  # type: ignore[attr-defined]
    for number in numbers:
        tensor = tensors[number]
        if isinstance(tensor, DividedTensor):
            tensor.refresh()  # the function may have changed the whole in place
    same = {id(whole): tensor for whole, tensor in zip(wholes, tensors, strict=True) if whole is not tensor}
    return pytree.tree_map_only(Tensor, lambda leaf: same.get(id(leaf), leaf), result) if same else result


def call_in_transform(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a function returns within a transform, as `torch.func.grad`: it runs on whole values."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    given = (args, kwargs)
    view = next(tensor.ranks for tensor in tensors if isinstance(tensor, DividedTensor))
    view.notify_whole(function, "it runs within a transform of torch.func")
    return call_with_whole(function, range(len(tensors)), tensors, given)


def note_change(plan: CallPlan, number: int, tensor: Tensor, value: Tensor) -> None:
    """Complete a change in place of a tensor argument.

    Args:
        plan: The plan of the call.
        number: The number of the argument.
        tensor: The argument.
        value: This rank's part of its new value; the argument itself if the function has changed the part.
    """
    place = len(plan.placements) - len(plan.changed) + plan.changed.index(number)
    placement, shape = plan.placements[place], plan.shapes[place]
    if isinstance(tensor, DividedTensor):
        if shape != tensor.logical_shape:
            part = tensor.local if value is tensor else value
            tensor.become(DividedTensor(part, placement, shape, tensor.ranks))
            return
        if value is not tensor:
            tensor.change(value)
        tensor.note_change()
    elif value is not tensor:
        with torch.no_grad() if shape != tuple(tensor.shape) else contextlib.nullcontext():
            (tensor if shape == tuple(tensor.shape) else tensor.resize_(shape)).copy_(value)


def divide_whole(whole: Tensor, view: LogicalView) -> DividedTensor:
    """Return a whole value as one that is divided: in rows if it has any."""
    shape = tuple(whole.shape)
    placement = Shard(0, split_lengths(shape[0], view.axis.size)) if shape else Partial()
    part = move_with_gradient(whole, view.axis, shape, Replicate(), placement)
    return DividedTensor(part, placement, shape, view)


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
            leaves.append(tensors[leaf.number])
        elif leaf is None:
            leaves.append(wrap(plan, next(numbers), next(remaining), tensors, view))
        else:
            leaves.append(leaf.value)
    if len(leaves) == 1 and plan.structure.is_leaf():
        return leaves[0]
    return pytree.tree_unflatten(leaves, plan.structure)


def wrap(plan: CallPlan, number: int, result: Tensor, tensors: Sequence[Tensor], view: LogicalView) -> Tensor:
    """Return a result as a logical tensor; the argument itself if it is one, and a whole value as it is."""
    layout: DividedLayout | None = plan.layouts.get(number, UNKNOWN)
    if layout is UNKNOWN:
        placement = plan.placements[number]
        is_whole = isinstance(placement, Replicate)
        order = plan.orders[number]
        layout = None if is_whole else view.find_layout(result, placement, plan.shapes[number], order)
        plan.layouts[number] = layout
    if layout is None:
        return result
    for tensor in tensors:
        if type(tensor) is DividedTensor and tensor.local is result:
            return tensor
    return make_divided(result, layout)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor is another view of the memory of a strided one."""
    if one is other or isinstance(one, DividedTensor) or torch._C._functorch.is_functorch_wrapped_tensor(one):
        return False
    return one.layout == torch.strided and bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def shard_rows(rows: Tensor, lengths: tuple[int, ...], view: LogicalView) -> DividedTensor:
    """Return a batch of which this rank has these rows; `lengths` has the number of rows of each rank."""
    return DividedTensor(rows, Shard(0, lengths), (sum(lengths), *rows.shape[1:]), view)
