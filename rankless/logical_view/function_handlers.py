"""What a logical tensor answers about itself, and what needs the whole value."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from rankless.compiler.ir.embedding_functions import EMBEDDING_BAG
from rankless.logical_view.call_observers import READ, MoveReason, send_call
from rankless.logical_view.redistribution import find_gradient_placement, move_with_gradient
from rankless.logical_view.tensor import (
    HANDLERS,
    IN_TRANSFORM,
    DividedTensor,
    LogicalView,
    call,
    divide_whole,
    make_divided,
    mark_part,
)
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.tensor_placement import Placement, Replicate, Shard

GETTERS = vars(torch._C.TensorBase)
REGISTER_HOOK = Tensor.register_hook
OF_WRAPPER = (
    *(GETTERS[name].__get__ for name in ("device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_sparse", "itemsize")),
    *(GETTERS[name].__get__ for name in ("layout", "nbytes", "ndim", "shape", "is_quantized", "is_nested")),
    *(GETTERS[name].__get__ for name in ("is_mps", "is_xla", "is_xpu", "is_sparse_csr", "is_mkldnn", "is_vulkan")),
    *(Tensor.__hash__, Tensor.__len__, Tensor.dim, Tensor.element_size, Tensor.get_device, Tensor.is_complex),
    *(Tensor.is_floating_point, Tensor.is_signed, Tensor.ndimension, Tensor.nelement, Tensor.numel, Tensor.size),
    *(torch.is_complex, torch.is_floating_point, torch.numel),
)
"""Functions that need the shape, dtype and device alone, which the wrapper has."""
OF_PART = (
    *(GETTERS[name].__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "retains_grad", "output_nr")),
    *(Tensor.is_contiguous, Tensor.is_pinned, Tensor.is_inference, Tensor.retain_grad),
    *(GETTERS["_version"].__get__,),
)
"""Functions whose answer for this rank's part holds for the whole value."""
OF_VALUES = (
    *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(Tensor.__complex__, torch.ops.aten._local_scalar_dense.default, torch.is_nonzero, Tensor.is_nonzero),
)
"""Functions that return numbers, which have no gradients."""
OF_WHOLE = (
    *(Tensor.numpy, Tensor.__array__, Tensor.__format__, Tensor.__contains__, Tensor.__iter__),
    *(Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__reduce_ex__, Tensor.__dlpack__),
    *(torch.equal, Tensor.equal),
)
"""Functions that read values."""

SHARING = (
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage),
    Tensor.__iter__,
)
"""Functions whose results share the memory of the tensor."""


def register(functions: tuple[Any, ...], handler: Callable[[Any], Callable[..., Any]]) -> None:
    """Let a handler stand for each of some functions; it is made for each."""
    HANDLERS.update({function: handler(function) for function in functions})


def run_on_whole(function: Any) -> Callable[..., Any]:
    """Return what calls a function with whole values."""

    reason = MoveReason("output", "read by", function)

    def run(*args: Any, **kwargs: Any) -> Any:
        wholes = [take_whole(value, reason) for value in args]
        if function is Tensor.__reduce_ex__:  # writes the attributes too
            wholes[0] = wholes[0].detach().requires_grad_(wholes[0].requires_grad)
        result = function(*wholes, **{name: take_whole(value, reason) for name, value in kwargs.items()})
        if function in SHARING:
            args[0].note_view(getattr(result, "base", None))
        return result

    return run


def run_on_values(function: Any) -> Callable[..., Any]:
    """Return what calls a function with a whole value that needs no gradient: it may be known already."""

    reason = MoveReason("output", "read by", function)

    def run(tensor: DividedTensor, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            whole = tensor.whole(reason)
        return function(whole.detach(), *args, **kwargs)

    return run


def take_whole(value: Any, reason: MoveReason = READ) -> Any:
    """Return a logical tensor whole, and anything else as it is."""
    return value.whole(reason) if isinstance(value, DividedTensor) else value


def run_on_part(function: Any) -> Callable[..., Any]:
    """Return what calls a function with this rank's part."""

    def run(tensor: DividedTensor, *args: Any, **kwargs: Any) -> Any:
        result = function(tensor.local, *args, **kwargs)
        return tensor if result is tensor.local else result

    return run


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the handler of others."""

    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        register(functions, lambda _: handler)
        return handler

    return add


register(OF_WRAPPER, lambda function: function)
register(OF_PART, run_on_part)
register(OF_WHOLE, run_on_whole)
register(OF_VALUES, run_on_values)


def wrap_gradient(gradient: Tensor | None, tensor: DividedTensor) -> Tensor | None:
    """Return the gradient of a logical tensor's part as the gradient of the tensor."""
    placement = find_gradient_placement(tensor.placement)
    if gradient is None or isinstance(placement, Replicate):
        return gradient
    return DividedTensor(gradient, placement, tensor.logical_shape, tensor.ranks)


def find_part(value: Tensor, like: DividedTensor, placement: Placement) -> Tensor:
    """Return this rank's part of a value in a placement; `like` has its shape."""
    before = value.placement if isinstance(value, DividedTensor) else Replicate()
    local = value.take_part() if isinstance(value, DividedTensor) else value
    return move_with_gradient(local, like.ranks.axis, like.logical_shape, before, placement)


@handles(Tensor.__repr__)
def format_tensor(tensor: DividedTensor, **options: Any) -> str:
    """Return the whole value as text, with what PyTorch prints of a tensor that needs a gradient."""
    whole = tensor.whole().detach()
    function = tensor.local.grad_fn
    text: str = whole.requires_grad_(tensor.local.requires_grad).__repr__(**options)
    return text if function is None else text.replace("requires_grad=True", f"grad_fn=<{function.name()}>")


@handles(Tensor.type)
def get_type(tensor: DividedTensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the name of the tensor's type, or the tensor in another one."""
    return tensor.local.type() if dtype is None else call(Tensor.type, (tensor, dtype, *args), kwargs)


@handles(Tensor.stride)
def get_stride(tensor: DividedTensor, dim: int | None = None) -> Any:
    """Return the strides that the whole value has, if it lies in memory as this rank's part does."""
    order = sorted(range(tensor.local.dim()), key=tensor.local.stride().__getitem__)
    strides, step = [0] * len(order), 1
    for place in order:
        strides[place] = step
        step *= max(1, tensor.logical_shape[place])
    return tuple(strides) if dim is None else strides[dim]


@handles(GETTERS["grad"].__get__)
def get_gradient(tensor: DividedTensor) -> Tensor | None:
    """Return the gradient."""
    return wrap_gradient(tensor.local.grad, tensor)


@handles(GETTERS["grad"].__set__)
def set_gradient(tensor: DividedTensor, value: Tensor | None) -> None:
    """Set the gradient."""
    placement = find_gradient_placement(tensor.placement)
    tensor.local.grad = None if value is None else find_part(value, tensor, placement)


@handles(Tensor.requires_grad_)
def require_gradient(tensor: DividedTensor, requires_grad: bool = True) -> DividedTensor:
    """Set whether the tensor needs a gradient."""
    mark_part(tensor.local.requires_grad_(requires_grad))
    return tensor


@handles(GETTERS["requires_grad"].__set__)
def set_requires_grad(tensor: DividedTensor, value: bool) -> None:
    """Set whether the tensor needs a gradient."""
    tensor.local.requires_grad = value
    mark_part(tensor.local)


@handles(GETTERS["data"].__get__)
def get_data(tensor: DividedTensor) -> DividedTensor:
    """Return the tensor without its history; it shares memory."""
    return make_divided(tensor.local.data, tensor.divided_as)


@handles(GETTERS["data"].__set__)
def set_data(tensor: DividedTensor, value: Tensor) -> None:
    """Give the tensor the memory of another one."""
    if tuple(value.shape) == tensor.logical_shape:
        tensor.local.data = find_part(value.detach(), tensor, tensor.placement)
        tensor._whole = None
    else:
        other = value if isinstance(value, DividedTensor) else divide_whole(value.detach(), tensor.ranks)
        tensor.become(DividedTensor(other.local.detach(), other.placement, other.logical_shape, tensor.ranks))


@handles(REGISTER_HOOK)
def register_hook(tensor: DividedTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Let a hook see and change the gradient, as a logical tensor, or as a plain one if it is whole."""

    def run(gradient: Tensor) -> Tensor | None:
        found = hook(wrap_gradient(gradient, tensor))  # type: ignore[arg-type]
        return None if found is None else find_part(found, tensor, find_gradient_placement(tensor.placement))

    return REGISTER_HOOK(tensor.local, run)  # type: ignore[no-untyped-call]


@handles(Tensor.__deepcopy__)
def copy_deeply(tensor: DividedTensor, memo: dict[int, Any]) -> DividedTensor:
    """Return a copy with memory of its own."""
    local = tensor.take_part().__deepcopy__(memo)
    copy = memo[id(tensor)] = make_divided(local, tensor.divided_as)
    return copy


def divide_again(whole: Tensor, dim: int, view: LogicalView) -> Tensor:
    """Return a plain tensor as a logical one that is divided along a dim, unless it has too few rows.

    Without this a model would run on all rows on every rank, once a script has put rows into another order.
    """
    division = BatchDivision.of(view.mesh)
    if not division.divides(whole.shape[dim]):
        return whole
    shape, placement = tuple(whole.shape), Shard(dim, division.split(whole.shape[dim]))
    # Memory of its own: a change in place of the rows must not look like one of the whole.
    rows = move_with_gradient(whole, view.axis, shape, Replicate(), placement).clone()
    return DividedTensor(rows, placement, shape, view)


def is_divided(tensor: Tensor, dim: int) -> TypeGuard[DividedTensor]:
    """Return whether a tensor is divided along a dim."""
    return isinstance(tensor, DividedTensor) and isinstance(tensor.placement, Shard) and tensor.placement.dim == dim


def is_transformed() -> bool:
    """Return whether PyTorch transforms what runs, or differentiates it forwards: then all values are whole."""
    return IN_TRANSFORM() is not None or forward_ad._current_level >= 0


JOINED = MoveReason("input", "input of", torch.cat)
CHOSEN = MoveReason("input", "input of a choice of rows")
IN_BAGS = MoveReason("input", "input of", F.embedding_bag)


@handles(torch.cat, torch.concat, torch.concatenate)
def join(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Join tensors; if they are divided along that dim, the result is divided again."""
    dim = args[0] if args else kwargs.get("dim", kwargs.get("axis", 0))
    divided = [tensor for tensor in tensors if is_divided(tensor, dim % max(1, tensor.dim()))]
    if divided and "out" not in kwargs and not is_transformed():
        wholes = [take_whole(tensor, JOINED) for tensor in tensors]
        return divide_again(torch.cat(wholes, dim), dim % divided[0].dim(), divided[0].ranks)
    found: Tensor = call(torch.cat, (tensors, *args), kwargs)
    return found


@handles(Tensor.__getitem__)
def index(tensor: Tensor, key: Any) -> Tensor:
    """Return elements; chosen rows, for example in a random order, are divided again."""
    key = make_index(key, tensor)
    rows, *others = key if isinstance(key, tuple) and key else (key,)
    if is_positions(rows) and is_divided(tensor, 0) and not is_transformed():
        if all(isinstance(item, slice) for item in others):
            return divide_again(take_whole(tensor, CHOSEN)[(take_whole(rows, CHOSEN), *others)], 0, tensor.ranks)
        count = len(tensor)
        if [is_positions(item) and len(item) == count for item in others] == [True]:
            numbers = torch.arange(count, device=rows.device)
            if not isinstance(rows, DividedTensor) and torch.equal(rows, numbers):
                return choose_in_rows(tensor, others[0])
    found: Tensor = call(Tensor.__getitem__, (tensor, key), {})
    return found


def is_positions(item: Any) -> TypeGuard[Tensor]:
    """Return whether a part of an index is a list of positions."""
    return isinstance(item, Tensor) and item.dim() == 1 and item.dtype == torch.int64


def choose_in_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return `tensor[arange(len(tensor)), positions]`, as the values of chosen actions or the last states of sequences.

    `gather` chooses within each row, so no row moves between ranks. The rows of an index could be any rows.
    """
    with torch._C._EnableTorchFunction():
        positions = torch.where(positions < 0, positions + tensor.shape[1], positions)
        places = positions.reshape(-1, *[1] * (tensor.dim() - 1)).expand(-1, 1, *tensor.shape[2:])
        return tensor.gather(1, places).squeeze(1)


@handles(Tensor.__setitem__)
def set_elements(tensor: Tensor, key: Any, value: Any) -> None:
    """Set elements."""
    call(Tensor.__setitem__, (tensor, make_index(key, tensor), value), {})


@handles(Tensor.new)
def make_new(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a new tensor, as old code does: of a size, or else of data. A trace takes a size for data."""
    size = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
    if size and all(isinstance(number, int) for number in size):
        return call(Tensor.new_empty, (tensor, tuple(size)), kwargs)
    return call(Tensor.new, (tensor, *args), kwargs)


@handles(torch._is_all_true)
def is_all_true(tensor: Tensor) -> Any:
    """Return whether all elements are true, as the checks of `torch.distributions` ask."""
    return call(Tensor.all, (tensor,), {})


def make_index(key: Any, tensor: Tensor) -> Any:
    """Return what chooses elements with tensors in place of other sequences of positions, as `x[[0, 2]]` has one.

    PyTorch makes tensors of them too, which would be constants of a trace, and their numbers part of its signature.
    """
    if isinstance(key, tuple):
        return tuple(make_index(item, tensor) for item in key)
    if isinstance(key, range):
        return torch.arange(key.start, key.stop, key.step, device=tensor.device)
    is_list = isinstance(key, list) and all(isinstance(item, int) for item in pytree.tree_leaves(key))
    is_array = hasattr(key, "__array__") and not isinstance(key, Tensor) and key.ndim > 0
    if is_list or is_array:
        return torch.tensor(key, dtype=None if len(key) else torch.int64, device=tensor.device)
    return key


def run_recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs recurrent layers on this rank's sequences; a trace would have operators for each time step."""

    def run(*args: Any) -> Any:
        has_sequences = len(args) == 9 and isinstance(args[3], bool)  # a packed batch has other arguments
        if (
            is_transformed()
            or not has_sequences
            or not is_divided(args[0], 0 if args[8] else 1)
            or (args[5] and args[6])
        ):
            return run_whole(function, args)
        x, states, rest = args[0], args[1], args[2:]
        rows: Any = x.placement
        view = x.ranks
        send_call(function, "divided")
        several = [states] if isinstance(states, Tensor) else list(states)
        parts = [divide_as(state, Shard(1, rows.lengths), view) for state in several]
        weights = [take_whole(weight) for weight in rest[0]]
        results = function(x.take_part(), parts[0] if isinstance(states, Tensor) else parts, weights, *rest[1:])
        output = (*x.logical_shape[:2], results[0].shape[2])
        shapes = [output, *(tuple(state.shape) for state in several)]
        placements = [rows, *(Shard(1, rows.lengths) for _ in several)]
        triples = zip(results, placements, shapes, strict=True)
        return tuple(DividedTensor(part, placement, shape, view) for part, placement, shape in triples)

    return run


@handles(F.embedding_bag)
def embed_bags(bags: Tensor, weight: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return the sums or means of the rows of bags, which lie one after the other from their offsets.

    A rank that has the offsets of some bags takes those of all, to know where its last bag ends, and looks up the rows
    of its own bags alone.
    """
    given = EMBEDDING_BAG.bind(bags, weight, offsets, *args, **kwargs).arguments
    depends_on_others = any(map(given.get, ("max_norm", "scale_grad_by_freq", "include_last_offset")))
    can_divide = bags.dim() == 1 and not depends_on_others and not is_transformed()
    if offsets is None or not can_divide or not is_divided(offsets, 0):
        found: Tensor = call(F.embedding_bag, (bags, weight, offsets, *args), kwargs)
        return found
    view, rows, own_offsets = offsets.ranks, offsets.placement, offsets.take_part()
    assert isinstance(rows, Shard)
    bounds = [*take_whole(offsets, IN_BAGS).tolist(), len(bags)]
    if bounds[0] or bounds != sorted(bounds):  # which PyTorch refuses
        return F.embedding_bag(take_whole(bags), take_whole(weight), take_whole(offsets), *args, **kwargs)
    send_call(F.embedding_bag, "divided")
    if type(bags) is Tensor:
        view.agreement.note_tensor(bags, F.embedding_bag)
    start, end = (bounds[sum(rows.lengths[:rank])] for rank in (view.axis.rank, view.axis.rank + 1))
    given |= {name: take_whole(value, IN_BAGS) for name, value in given.items() if name not in ("offsets", "input")}
    for name in ("input", "per_sample_weights"):
        if given.get(name) is not None:
            given[name] = take_whole(given[name], IN_BAGS)[start:end]
    part = F.embedding_bag(**given | {"offsets": own_offsets - start})
    return DividedTensor(part, rows, (len(offsets), *part.shape[1:]), view)


def run_whole(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function with whole values, and tell the user."""
    leaves, structure = pytree.tree_flatten(list(args))
    view = next(leaf.ranks for leaf in leaves if isinstance(leaf, DividedTensor))
    view.notify_whole(function, "its sequences are packed or not divided, or it has dropout between layers")
    reason = MoveReason("input", "input of", function)
    return function(*pytree.tree_unflatten([take_whole(leaf, reason) for leaf in leaves], structure))


def divide_as(value: Tensor, placement: Shard, view: LogicalView) -> Tensor:
    """Return this rank's part of a value in a placement."""
    before = value.placement if isinstance(value, DividedTensor) else Replicate()
    local = value.take_part() if isinstance(value, DividedTensor) else value
    return move_with_gradient(local, view.axis, tuple(value.shape), before, placement).contiguous()


register((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), run_recurrent)


def take_whole_values(name: str) -> property:
    """Return an attribute of tensors to which a script may assign a logical tensor: plain tensors get the whole value.

    PyTorch's own asks the tensor, but not the new value, whether its class has a function of its own.
    """
    own = GETTERS[name]
    get_divided, set_divided = HANDLERS[own.__get__], HANDLERS[own.__set__]

    def read(tensor: Tensor) -> Any:
        return get_divided(tensor) if isinstance(tensor, DividedTensor) else own.__get__(tensor)

    def assign(tensor: Tensor, value: Any) -> None:
        if isinstance(tensor, DividedTensor):
            set_divided(tensor, value)
        else:
            own.__set__(tensor, take_whole(value))

    return property(read, assign, own.__delete__)


def make_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a parameter: plain and whole, also of a logical tensor."""

    def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        if isinstance(data, DividedTensor):
            with torch.no_grad():
                whole = data.whole().detach()
            data.note_view()
            return original(cls, whole, requires_grad)
        return original(cls, data, requires_grad)

    return new
