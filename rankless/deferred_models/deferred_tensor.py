"""Tensors whose values are not computed yet; see Note [deferred values]."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rankless.deferred_models.recording import DRAWN_BY, OVERWRITING, Operation, OperatorRecording, Reference
from rankless.errors import DeferredError
from rankless.parallel.default_generator import find_default_generator
from rankless.user_code import caller_line

META = torch.device("meta")
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]  # the stubs have it as a tensor
READS: tuple[Any, ...] = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
"""Methods that read memory below operators."""


class DeferredTensor(Tensor):
    """A tensor that takes no memory: it knows its shape, dtype and device, and how to compute its values."""

    recording: OperatorRecording
    number: int

    @staticmethod
    def __new__(
        cls: "type[DeferredTensor]", recording: OperatorRecording, number: int, device: torch.device
    ) -> "DeferredTensor":
        """Make the tensor of a number of a recording, which will be on `device`."""
        shape = recording.shapes[number]
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls,
            shape.shape,
            strides=shape.stride(),
            storage_offset=shape.storage_offset(),
            dtype=shape.dtype,
            device=device,
        )
        made.represent(recording, number)
        return made

    def represent(self, recording: OperatorRecording, number: int) -> None:
        """Stand for a number of a recording."""
        self.recording, self.number = recording, number
        recording.alive[number] = self

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]  # the base class has an argument of PyTorch
        """Return a text without values."""
        return f"DeferredTensor({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeferredTensor":
        """Return a copy with a value of its own."""
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        memo[id(self)] = copied
        result: DeferredTensor = copied
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be saved."""
        raise refuse("saving or sending it")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Follow assignments of `.data`, and compute values for reads below operators."""
        if func == SET_DATA:
            return set_data(*args)
        if func in READS:
            with pause_recording():
                (value,) = args[0].recording.evaluate([args[0].number])
                return func(value, *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack the class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record an operator. Outside `rankless.deferred()` it must not take other tensors, as a forward pass does.

        Only copies from them are recorded, as those of `load_state_dict`.
        """
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        takes_values = func.overloadpacket is not torch.ops.aten.copy_
        if takes_values and any(not isinstance(item, DeferredTensor) and item.dim() > 0 for item in tensors):
            raise refuse(f"{func} with other tensors")
        return record(find_recording(tensors), func, args, kwargs)


class RecordingMode(TorchDispatchMode):
    """Within this mode tensors are deferred, unless all that goes into them is there already."""

    def __init__(self, recording: OperatorRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch declares no types here
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record an operator that makes a tensor from nothing, or works on deferred tensors."""
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]) == META
        if is_meta or (tensors and not any(isinstance(item, DeferredTensor) for item in tensors)):
            return func(*args, **kwargs)
        if not tensors and is_scalar(func, args, kwargs):
            return func(*args, **kwargs)
        return record(find_recording(tensors) if tensors else self.recording, func, args, kwargs)


def is_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator that makes a tensor from nothing makes one element, which needs no deferring."""
    try:
        made = run_on_meta(OperatorRecording(), func, *pytree.tree_flatten((args, kwargs)))
    except (NotImplementedError, RuntimeError):  # `record` deals with it
        return False
    return isinstance(made, Tensor) and made.numel() <= 1


def find_recording(tensors: list[Tensor]) -> OperatorRecording:
    """Return the recording of the deferred tensors among some."""
    recordings = {id(item.recording): item.recording for item in tensors if isinstance(item, DeferredTensor)}
    if len(recordings) > 1:
        raise refuse("an operator on tensors of two `with rankless.deferred()` blocks")
    (found,) = recordings.values()
    return found


def record(recording: OperatorRecording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator: deferred tensors, or values where these decide how the script goes on."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    deferred = [leaf for leaf in leaves if isinstance(leaf, DeferredTensor)]
    changed = find_changed(func, args, kwargs)
    if any(not isinstance(item, DeferredTensor) for item in changed):  # memory that is there gets the value
        return run_now(recording, func, leaves, spec)
    device = find_device(deferred, kwargs)
    try:
        found = run_on_meta(recording, func, leaves, spec)
    except (NotImplementedError, RuntimeError) as error:  # the result depends on values, as that of item() does
        if changed:
            raise refuse(f"{func}, whose result depends on values") from error
        return run_now(recording, func, leaves, spec)
    known = {id(recording.shapes[item.number]): item for item in deferred}
    results, result_spec = pytree.tree_flatten(found)
    generator = draw(recording, func, args, kwargs, found)
    numbers: list[int | None] = []
    for place, value in enumerate(results):
        if not isinstance(value, Tensor) or id(value) in known:
            numbers.append(None)
            results[place] = known.get(id(value), value)
            continue
        number = recording.add_tensor(value)
        numbers.append(number)
        results[place] = DeferredTensor(recording, number, device)
    references = [Reference(leaf.number) if isinstance(leaf, DeferredTensor) else copy_value(leaf) for leaf in leaves]
    kept_args, kept_kwargs = pytree.tree_unflatten(references, spec)
    recording.add_operation(
        Operation(
            operator=func,
            args=kept_args,
            kwargs=kept_kwargs,
            results=tuple(numbers),
            storages=frozenset(recording.storage(item.number) for item in changed if isinstance(item, DeferredTensor)),
            overwrites=func.overloadpacket.__name__ in OVERWRITING and recording.covers_storage(args[0].number),
            generator=generator,
        )
    )
    return pytree.tree_unflatten(results, result_spec)


def find_changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator changes."""
    named = name_arguments(func, args, kwargs)
    return [
        leaf
        for described in func._schema.arguments
        if described.alias_info is not None and described.alias_info.is_write
        for leaf in pytree.tree_leaves(named.get(described.name))
        if isinstance(leaf, Tensor)
    ]


def find_device(deferred: list[DeferredTensor], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device on which a result will be."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return deferred[0].device if deferred else torch.device("cpu")


def run_on_meta(recording: OperatorRecording, func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Run an operator on shapes alone."""
    shapes = [
        recording.shapes[leaf.number]
        if isinstance(leaf, DeferredTensor)
        else leaf.to(META)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(shapes, spec)
    if any(described.name == "device" for described in func._schema.arguments):
        kwargs = {**kwargs, "device": META} | ({"pin_memory": False} if kwargs.get("pin_memory") else {})
    if "generator" in kwargs:
        kwargs = {**kwargs, "generator": None}
    return func(*args, **kwargs)


def run_now(recording: OperatorRecording, func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Run an operator on the values of its deferred arguments."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, DeferredTensor)]
    with pause_recording():
        values = recording.evaluate([leaves[place].number for place in places])
        known = dict(zip(places, values, strict=True))
        args, kwargs = pytree.tree_unflatten([known.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
        return func(*args, **kwargs)


def draw(
    recording: OperatorRecording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Any
) -> tuple[torch.Generator, Tensor] | None:
    """Advance the generator of a random operator as it would. Return it with its state before; None if none draws.

    `shape` is the operator's result on the meta device. Numbers that depend on no value are drawn into lent memory.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    device = find_device([leaf for leaf in args if isinstance(leaf, DeferredTensor)], kwargs)
    generator = kwargs.get("generator") or find_default_generator(device)
    state = generator.get_state()
    name = func.overloadpacket.__name__
    if name in OVERWRITING:
        with pause_recording():
            func(recording.lend_memory(shape, device), *args[1:], **kwargs)
    elif name.removesuffix("_like") in DRAWN_BY:
        with pause_recording():
            memory = recording.lend_memory(shape, device)
            DRAWN_BY[name.removesuffix("_like")](memory, name_arguments(func, args, kwargs), generator)
    else:
        run_now(recording, func, *pytree.tree_flatten((args, kwargs)))
    return generator, state


def name_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return dict(zip((item.name for item in func._schema.arguments), args, strict=False)) | dict(kwargs)


def copy_value(leaf: Any) -> Any:
    """Return a copy of a tensor, which the script may change later, and other arguments as they are."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@contextlib.contextmanager
def pause_recording() -> Iterator[None]:
    """Within the context, operators run."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor the memory of another, as `tensor.data = value` does."""
    if not (isinstance(tensor, DeferredTensor) and isinstance(value, DeferredTensor)):
        raise refuse("an assignment of .data between it and another tensor")
    with torch.no_grad():
        alias: Any = value.detach()
    with torch._C.DisableTorchFunctionSubclass():
        SET_DATA(tensor, alias)
    tensor.represent(alias.recording, alias.number)


def refuse(use: str) -> DeferredError:
    """Return the error for a use of a deferred tensor that needs its values."""
    return DeferredError(
        expected="a model with values",
        found=f"{use}, but the model was built in `with rankless.deferred()` and has none yet",
        fix="name the model in model= of the job, whose first call computes them; or, after the block, call "
        "build.materialize(model), with `with rankless.deferred() as build:`",
        where=caller_line(),
    )
