"""Backward passes in a logical view: gradients of plain tensors are summed over the ranks before anything sees them.

A backward pass gives each rank its term of the gradient of a plain tensor; see Note [placements of gradients]. Between
two passes `.grad` is whole. So a pass begins without the gradients of earlier ones, sums what it has computed, and then
adds that to the earlier gradient in place, as autograd accumulates.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.autograd.graph import GradientEdge
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import Parameter
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.logical_view.bucketed_gradient_sums import POST_HOOK, GradientPass, find_leaves
from rankless.logical_view.call_observers import MoveReason
from rankless.logical_view.function_handlers import (
    REGISTER_HOOK,
    find_part,
    make_parameter,
    take_whole,
    take_whole_values,
    wrap_gradient,
)
from rankless.logical_view.redistribution import find_gradient_placement, move_with_gradient
from rankless.logical_view.tensor import HANDLERS, IN_TRANSFORM, DividedTensor, LogicalView
from rankless.logical_view.trace_call_to_program import TRACE_STATE
from rankless.parallel.tensor_placement import Partial, Placement, Replicate
from rankless.user_code import caller_line

RUN_BACKWARD = torch.autograd.backward
RUN_GRAD = torch.autograd.grad
APPLY: Any = vars(torch.autograd.Function)["apply"]
"""A class method in Python; since PyTorch 2.14 one in C++."""
TRANSFORMS = [
    (module, name, vars(module)[name])
    for module, name in (
        (apis, "vmap_impl"),
        (eager_transforms, "_vjp_with_argnums"),
        (eager_transforms, "_jvp_with_argnums"),
        (eager_transforms, "grad_and_value_impl"),
        (eager_transforms, "linearize"),
    )
    if hasattr(module, name)
]
"""What runs functions of the script under the transforms of `torch.func`."""
HIGHER_ORDER = "_higher_order_ops"
COMPILE = torch.compile
RETAIN_GRAD: Callable[[Tensor], None] = Tensor.retain_grad
SWAP_TENSORS: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
MAKE_HOOK: Callable[..., None] = vars(BackwardHook)["__init__"]


class LogicalBackward:
    """Runs the backward passes of a script.

    Args:
        view: The ranks.
    """

    def __init__(self, view: LogicalView) -> None:
        self._view = view
        self._pass: GradientPass | None = None
        """The present pass."""
        self._retained: list[ReferenceType[Tensor]] = []
        """Plain tensors that are no leaves, and keep their gradients."""
        self._compiles = False
        self._is_running = False
        """Whether autograd runs. A pass within it is a checkpoint's."""

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Within the context, PyTorch's functions of gradients know of the ranks."""
        changed: list[tuple[Any, str, Any]] = [
            (torch.autograd, "backward", self.backward),
            (torch.autograd, "grad", offer_to_modes(self.grad)),
            (Tensor, "register_hook", offer_to_modes(self._register_hook())),
            (Tensor, "register_post_accumulate_grad_hook", offer_to_modes(self._register_post_hook())),
            (Tensor, "retain_grad", offer_to_modes(self._retain_gradient())),
            (torch, "compile", self._compile),
            (torch, "tensor", mark_new(torch.tensor, "aten::tensor")),
            (torch, "asarray", mark_new(torch.asarray)),
            (torch.autograd.Variable, "__new__", staticmethod(mark_new(torch.autograd.Variable.__new__))),
            (torch.autograd.Function, "apply", classmethod(self._run_whole(apply_function))),
            *((module, name, self._run_whole(run)) for module, name, run in TRANSFORMS),
            *((Tensor, name, take_whole_values(name)) for name in ("data", "grad")),
            (torch.utils, "swap_tensors", self._swap),
            (BackwardHook, "__init__", self._make_module_hooks()),
            (Parameter, "__new__", staticmethod(make_parameter(Parameter.__new__))),
        ]
        HANDLERS[Tensor.backward] = self._backward_of
        try:
            with replace_attributes(*changed):
                yield
        finally:
            del HANDLERS[Tensor.backward]
            if self._compiles:
                self._compiles = False
                torch.compiler.set_stance("default")

    def _backward_of(
        self,
        tensor: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run `Tensor.backward`, which calls what the script finds as `torch.autograd.backward`."""
        with torch._C._EnableTorchFunction():
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Run `torch.autograd.backward`, and sum the gradients of plain leaves over the ranks."""
        if is_traced():
            RUN_BACKWARD(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        given = grad_variables if grad_tensors is None else grad_tensors
        with torch._C.DisableTorchFunctionSubclass():
            asked = None if inputs is None else [get_part(item) for item in as_list(inputs)]
            options = {"retain_graph": retain_graph, "create_graph": create_graph}
            if self._pass is not None:  # within a backward pass, as of a checkpoint: gradients lie as they should
                roots, gradients = [*map(get_part, as_list(tensors))], [*map(get_part, as_list(given))]
                self._run(self._pass, roots, gradients, asked, options)
                return
            self._view.agreement.check("a backward pass", generators=True)
            roots, gradients = self._start(tensors, given)
            present = self._pass = GradientPass(self._view.shards, create_graph=create_graph)
            is_complete = False
            try:
                retained = [tensor for reference in self._retained if (tensor := reference()) is not None]
                present.add(retained, overlaps=False)
                self._run(present, roots, gradients, asked, options)
                present.finish()
                is_complete = True
            finally:
                self._pass = None
                if not is_complete:
                    present.undo()

    def _run(
        self,
        present: GradientPass,
        roots: list[Tensor],
        gradients: list[Tensor],
        asked: list[Tensor] | None,
        options: Mapping[str, Any],
    ) -> None:
        """Run PyTorch's backward pass; its hooks and checkpoints run functions of the script."""
        present.add(find_leaves(roots) if asked is None else asked, overlaps=not self._is_running)
        before, self._is_running = self._is_running, True
        try:
            with torch._C._EnableTorchFunction():
                RUN_BACKWARD(roots, gradients, inputs=asked, **options)
        finally:
            self._is_running = before

    def _start(self, tensors: Any, given: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of roots and of their gradients."""
        roots = as_list(tensors)
        gradients = [None] * len(roots) if given is None else as_list(given)
        parts = []
        for root, gradient in zip(roots, gradients, strict=True):
            value = make_first_gradient(root) if gradient is None else gradient
            parts.append(self._find_gradient_part(root, value))
        return [get_part(root) for root in roots], parts

    def _find_gradient_part(self, root: Tensor, gradient: Tensor) -> Tensor:
        if isinstance(root, DividedTensor):
            return find_part(gradient, root, find_gradient_placement(root.placement))
        whole = gradient.whole() if isinstance(gradient, DividedTensor) else gradient
        return move_with_gradient(whole, self._view.axis, tuple(root.shape), Replicate(), Partial())

    def grad(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Run `torch.autograd.grad`; gradients of plain tensors are whole."""
        if is_traced():
            found: tuple[Tensor | None, ...] = RUN_GRAD(outputs, inputs, grad_outputs, *args, **kwargs)
            return found
        with torch._C.DisableTorchFunctionSubclass():
            roots, gradients = self._start(outputs, grad_outputs)
            asked = as_list(inputs)
            with torch._C._EnableTorchFunction():
                found = RUN_GRAD(roots, [get_part(item) for item in asked], gradients, *args, **kwargs)
            return tuple(map(self._make_whole, found, asked))

    def _make_whole(self, gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
        if gradient is None or isinstance(tensor, DividedTensor):
            return wrap_gradient(gradient, tensor) if isinstance(tensor, DividedTensor) else None
        return move_with_gradient(gradient, self._view.axis, tuple(gradient.shape), Partial(), Replicate())

    def _make_module_hooks(self) -> Callable[..., None]:
        """Return `BackwardHook.__init__`: a module's backward hooks see and change whole gradients.

        The module's inputs and outputs pass through an autograd function, so they are whole.
        """
        axis = self._view.axis

        def convert(gradients: Any, before: Placement, after: Placement) -> Any:
            return pytree.tree_map_only(
                Tensor, lambda item: move_with_gradient(item, axis, tuple(item.shape), before, after), gradients
            )

        def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
            def run(module: Any, *gradients: Any) -> Any:
                found = hook(module, *convert(gradients, Partial(), Replicate()))
                return None if found is None else convert(found, Replicate(), Partial())

            return run

        def initialize(self: BackwardHook, module: Any, hooks: Sequence[Any], pre_hooks: Sequence[Any]) -> None:
            MAKE_HOOK(self, module, [*map(wrap, hooks)], [*map(wrap, pre_hooks)])

        return initialize

    def _run_whole(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of PyTorch that runs a function of the script, which then gets whole values."""

        def run_whole(function: Any, *args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if any(isinstance(leaf, DividedTensor) for leaf in leaves):
                is_class = isinstance(function, type)
                where = "a torch.autograd.Function" if is_class else "a transform of torch.func, or a compiled function"
                self._view.notify_whole(function, f"its code is the script's, in {where}")
                reason = MoveReason("input", "input of", function)
                args, kwargs = pytree.tree_unflatten([take_whole(leaf, reason) for leaf in leaves], spec)
            return run(function, *args, **kwargs)

        return run_whole

    def _register_hook(self) -> Callable[..., Any]:
        """Return `Tensor.register_hook` for plain tensors: the hook sees and changes whole gradients."""
        axis = self._view.axis

        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
            if isinstance(tensor, DividedTensor):
                return HANDLERS[REGISTER_HOOK](tensor, hook)

            def run(gradient: Tensor) -> Tensor:
                whole = move_with_gradient(gradient, axis, tuple(gradient.shape), Partial(), Replicate())
                found = hook(whole)
                changed = whole if found is None else found
                return move_with_gradient(changed, axis, tuple(gradient.shape), Replicate(), Partial())

            return REGISTER_HOOK(tensor, run)  # type: ignore[no-untyped-call]

        return register_hook

    def _register_post_hook(self) -> Callable[..., Any]:
        """Return `Tensor.register_post_accumulate_grad_hook`: the hook finds whole gradients, as of an optimizer."""

        def register_post_accumulate_grad_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
            if isinstance(tensor, DividedTensor):
                return POST_HOOK(tensor.local, lambda _: hook(tensor))  # type: ignore[no-untyped-call]

            def run(leaf: Tensor) -> None:
                present = self._pass
                if present is None:  # in `torch.autograd.grad`, say
                    hook(leaf)
                    return
                present.complete(leaf)
                hook(leaf)
                present.suspend(leaf)

            return POST_HOOK(tensor, run)  # type: ignore[no-untyped-call]

        return register_post_accumulate_grad_hook

    def _retain_gradient(self) -> Callable[[Tensor], None]:
        """Return `Tensor.retain_grad`: the gradient of a plain tensor is whole after the pass."""

        def retain_grad(tensor: Tensor) -> None:
            RETAIN_GRAD(get_part(tensor))  # PyTorch's own would find this function by its name, and call it for parts
            if not isinstance(tensor, DividedTensor) and not tensor.is_leaf:
                self._retained = [known for known in self._retained if known() is not None]
                self._retained.append(ref(tensor))

        return retain_grad

    def _swap(self, one: Tensor, other: Tensor) -> None:
        """Run `torch.utils.swap_tensors`."""
        self._view.agreement.forget_tensors(one, other)
        SWAP_TENSORS(one, other)

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        """Run `torch.compile`. The functions run as plain Python, because their batches are divided."""
        if HIGHER_ORDER in sys._getframe(1).f_code.co_filename:  # as `torch.cond`, which PyTorch traces in any case
            return self._run_whole(functools.partial(call_compiled, COMPILE(*args, **kwargs)))
        if not self._compiles:
            self._compiles = True
            torch.compiler.set_stance("force_eager")
            self._view.notify(
                f"{caller_line()}: torch.compile has no effect on divided batches: functions run uncompiled (correct)"
            )
        return COMPILE(*args, **kwargs)


def apply_function(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own `apply` of a custom function."""
    return APPLY.__get__(None, function)(*args, **kwargs)


def is_traced() -> bool:
    """Return whether PyTorch traces or transforms a function, in which all values are whole."""
    return TRACE_STATE.is_tracing or IN_TRANSFORM() is not None or get_proxy_mode() is not None


def call_compiled(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function, also where others run as plain Python."""
    with torch.compiler.set_stance("default"):
        return compiled(*args, **kwargs)


def offer_to_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that stands for one of PyTorch's: modes of functions, as `torch.set_default_device`, see it.

    PyTorch's own function offers itself to them too, under its public name, and would so call what stands for it again.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(run, (), *args, **kwargs)
        return function(*args, **kwargs)

    return run


def mark_new(make: Callable[..., Any], scripted: str | None = None) -> Callable[..., Any]:
    """Return a function of PyTorch that makes tensors in C++, where `requires_grad=True` would mark a wrapper alone.

    Args:
        make: The function.
        scripted: The operator that scripts take it for.
    """

    @functools.wraps(make)
    def run(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if isinstance(made, DividedTensor):
            with torch._C.DisableTorchFunctionSubclass():
                requires_grad, made.requires_grad = made.requires_grad, False
            made.requires_grad_(requires_grad)
        return made

    if scripted is not None:
        torch.jit._builtins._register_builtin(run, scripted)
    return run


def as_list(tensors: Any) -> list[Any]:
    """Return one tensor or several, of which PyTorch takes any iterable, as a list."""
    return [tensors] if tensors is None or isinstance(tensors, Tensor | GradientEdge) else list(tensors)


def get_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor."""
    return tensor.take_part() if isinstance(tensor, DividedTensor) else tensor


def make_first_gradient(root: Tensor) -> Tensor:
    """Return the gradient of a number by itself. Raises RuntimeError, as PyTorch does, for anything larger."""
    shape = root.logical_shape if isinstance(root, DividedTensor) else tuple(root.shape)
    if torch.Size(shape).numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones(shape, dtype=root.dtype, device=root.device)
