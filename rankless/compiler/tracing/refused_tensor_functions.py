"""Tensor functions that a job may not call, because a captured program would lose their effect or freeze their result.

`SourceLineMode` asks for each call of a tensor function during capture.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._subclasses.functional_tensor import FunctionalTensor

from rankless.errors import CaptureError

EXPECTED_NO_VALUES = "a job that does not read the values of tensors: they have none during capture"
FIX_NO_VALUES = "do this outside the job; return the tensor to read its values there"
READS_VALUES: dict[Any, str] = {
    torch.Tensor.__repr__: "print of a tensor",
    torch.Tensor.__format__: "a tensor formatted as text",
    torch.Tensor.numpy: "a tensor turned into a NumPy array",
    torch.Tensor.__array__: "a tensor turned into a NumPy array",
    torch.Tensor.tolist: "a tensor turned into a list of numbers",
    torch.Tensor.data_ptr: "the address of a tensor",
    torch.Tensor.storage: "the storage of a tensor",
    torch.Tensor.untyped_storage: "the storage of a tensor",
}
"""Functions that behave differently during capture than in the plain script, if the user's code calls them."""

EXPECTED_FIXED_PARAMETERS = "a job whose parameters keep their memory and their flags"
FIX_CHANGE_OUTSIDE = (
    "change it before or after the call of the job, for example `with torch.no_grad(): parameter.copy_(new)`"
)
SETS_REQUIRES_GRAD = "requires_grad of {} set inside the job"
SETS_GRAD = ".grad of {} set inside the job"
REFUSED_ON_MODULE_TENSORS: dict[Any, str] = {
    torch.Tensor.requires_grad_: SETS_REQUIRES_GRAD,
    torch.Tensor.requires_grad.__set__: SETS_REQUIRES_GRAD,  # type: ignore[attr-defined]  # a getset descriptor
    torch.Tensor.grad.__set__: SETS_GRAD,  # type: ignore[union-attr]  # a getset descriptor
}
GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # a getset descriptor
"""Functions refused on parameters and buffers only, because the program's gradients are fixed before the trace.

On other tensors a job may set `requires_grad`, as gradient penalties do.
"""

CHANGING_METHODS = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")}
)
"""Methods that change a tensor in place, besides those whose names end with an underscore."""
KEEPING_METHODS = frozenset({"requires_grad_", "retain_grad_", "share_memory_"})
"""Methods whose names end with an underscore, and that leave the values."""

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a getset descriptor
"""Sets `tensor.data`. Tracing ignores it, so that the program would use the old values."""
GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor


class ModuleTensors:
    """The parameters and buffers of a traced job, with a description that has their name.

    Args:
        described: What stands for them in the trace, by description.
        originals: The tensors themselves, by description.
    """

    def __init__(self, described: Mapping[str, Tensor], originals: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self._described = {id(tensor): text for text, tensor in described.items()}
        self._originals = {id(tensor): text for text, tensor in originals.items()}
        self._data: dict[int, tuple[Tensor, Tensor]] = {}
        self._differentiated: dict[int, Tensor] = {}
        self.lines_of_set_data: dict[str, str] = {}
        """Where the job has set `.data` to another tensor, by description."""

    def describe(self, tensor: Any) -> str | None:
        """Return a description such as "parameter 'model.weight'"; None for all other objects."""
        return self._described.get(id(tensor))

    def describe_original(self, tensor: Tensor) -> str | None:
        """Return the description of a parameter or buffer that the script has under another name; None for others."""
        return self._originals.get(id(tensor))

    def note_graph(self, loss: Tensor) -> None:
        """Note the tensors of the script, such as another model's parameters, that a loss's gradient would reach."""
        found, waiting = set[Any](), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in found:
                continue
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                self._differentiated[id(variable)] = variable

    def is_differentiated(self, tensor: Tensor) -> bool:
        """Return whether autograd would compute a gradient of a tensor of the script, such as one of another model.

        A tensor that the script has computed from parameters counts as one: its gradient would go on to them.
        """
        return tensor.requires_grad and (not tensor.is_leaf or id(tensor) in self._differentiated)

    def add_data(self, tensor: Tensor, data: Tensor) -> None:
        """Note that `data` is `tensor.data`."""
        self._data[id(data)] = (tensor, data)

    def set_data(self, tensor: Tensor, value: Tensor, line: str) -> None:
        """Trace `tensor.data = value` as a change in place."""
        self.lines_of_set_data[self._described[id(tensor)]] = line
        with torch.no_grad():
            tensor.copy_(value)

    def may_set_data(self, tensor: Tensor, value: Tensor) -> bool:
        """Return whether a job may set `tensor.data = value`: a parameter's or buffer's, to another like it."""
        return self.describe(tensor) is not None and (tensor.shape, tensor.dtype, tensor.device, tensor.stride()) == (
            value.shape,
            value.dtype,
            value.device,
            value.stride(),
        )

    def is_own_data(self, tensor: Tensor, value: Any) -> bool:
        """Return whether `tensor.data = value` changes nothing, as after `tensor.data *= 2`, or in `Module.to`."""
        return value is tensor or (id(value) in self._data and self._data[id(value)][0] is tensor)


def find_refusal(
    function: Callable[..., Any], args: Sequence[Any], module_tensors: ModuleTensors, *, by_user: bool
) -> CaptureError | None:
    """Return the error for a call that a job may not make; None for all others.

    Args:
        function: The tensor function, as PyTorch passes it to a function mode.
        module_tensors: The job's parameters and buffers.
        by_user: Whether the user's code makes the call, not PyTorch.
    """
    if by_user and function in READS_VALUES:
        return CaptureError(
            expected=EXPECTED_NO_VALUES, found=f"{READS_VALUES[function]} inside the job", fix=FIX_NO_VALUES
        )
    if by_user and function == GET_GRAD and module_tensors.describe(args[0]) is not None:
        return CaptureError(
            expected="a job that computes from parameters and arguments; gradients are there after the call",
            found=f".grad of {module_tensors.describe(args[0])} read inside the job, where it has no value",
            fix="read .grad after the call and pass what you compute from it as an argument, or use "
            "torch.autograd.grad inside the job",
        )
    outside = find_changed_outside(function, args, module_tensors)
    if outside is not None:
        return outside
    sets_data = function == SET_DATA and not module_tensors.is_own_data(args[0], args[1])
    if sets_data and not module_tensors.may_set_data(args[0], args[1]):
        return refuse_set_data(module_tensors.describe(args[0]))
    text = REFUSED_ON_MODULE_TENSORS.get(function)
    described = None if text is None else module_tensors.describe(args[0])
    if text is None or described is None or (text is SETS_GRAD and args[1] is None):
        return None
    return CaptureError(expected=EXPECTED_FIXED_PARAMETERS, found=text.format(described), fix=FIX_CHANGE_OUTSIDE)


def find_changed_outside(
    function: Callable[..., Any], args: Sequence[Any], module_tensors: ModuleTensors
) -> CaptureError | None:
    """Return the error for a change in place of a tensor of the script, which is no tensor of the job; else None."""
    name = getattr(function, "__name__", "")
    is_change = name in CHANGING_METHODS or (name.endswith("_") and not name.endswith("__"))
    if not is_change or not args or name in KEEPING_METHODS:
        return None
    changed = args[0] if isinstance(args[0], list | tuple) else args[:1]
    for tensor in changed:
        # The trace wraps all tensors of the job: its arguments, its modules', and what it computes from them.
        is_traced = isinstance(unwrap_transforms(tensor), FunctionalTensor)
        is_traced = is_traced or module_tensors.describe(tensor) is not None
        if isinstance(tensor, Tensor) and not is_traced:
            own = module_tensors.describe_original(tensor)
            if own is not None:
                return refuse_other_name(own)
            return CaptureError(
                expected="a job that changes no tensors but buffers of its modules",
                found=f"a tensor of shape {list(tensor.shape)} from outside the job changed in place by {name}()",
                fix="make the tensor a buffer of a module passed as model=, or return the value and change the "
                "tensor after the call",
            )
    return None


def refuse_other_name(described: str) -> CaptureError:
    """Return the error for a parameter or buffer that the function does not take from its module."""
    return CaptureError(
        expected="a job that takes parameters and buffers from their modules, whose tensors the trace replaces",
        found=f"{described} under a name of the script, such as a list made before the call",
        fix="take it from the module within the function, as in `for parameter in model.parameters()`",
    )


def unwrap_transforms(value: Any) -> Any:
    """Return the tensor within the wrappers of the transforms of `torch.func`; anything else as it is."""
    while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


def refuse_set_data(described: str | None) -> CaptureError:
    """Return the error for `tensor.data = …`, given the description of a parameter or buffer."""
    expected = "a job that sets .data of a parameter or buffer to a tensor of the same shape, strides and dtype"
    fix = "keep its shape and dtype, or replace it outside the job"
    if described is None:
        expected = "a job that computes new tensors"
        fix = "use the new tensor instead; x + (new - x).detach() has the values of new and the gradient of x"
    return CaptureError(expected=expected, found=f".data of {described or 'a tensor'} set inside the job", fix=fix)
