"""Backward passes in a logical view: gradients of plain tensors are summed over the ranks before anything sees them.

A backward pass gives each rank its term of the gradient of a plain tensor; see Note [placements of gradients]. Between
two passes `.grad` is whole. So a pass begins without the gradients of earlier ones, sums what it has computed, and then
adds that to the earlier gradient in place, as autograd accumulates.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from rankless.collectives.mesh_collectives import all_reduce, flatten_by_kind
from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.logical.call_trace import TRACE_STATE
from rankless.logical.handlers import REGISTER_HOOK, find_part, take_whole, wrap_gradient
from rankless.logical.moves import find_gradient_placement, move, move_with_gradient
from rankless.logical.tensor import HANDLERS, DividedTensor, LogicalView
from rankless.parallel.tensor_placement import Partial, Placement, Replicate

RUN_BACKWARD = torch.autograd.backward
RUN_GRAD = torch.autograd.grad
APPLY = vars(torch.autograd.Function)["apply"].__func__
VMAP = vars(apis)["vmap_impl"]
MAKE_HOOK: Callable[..., None] = vars(BackwardHook)["__init__"]


class GradientPass:
    """The plain leaves of one backward pass, and their earlier gradients."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self._earlier: list[Tensor | None] = []
        self._known: set[int] = set()

    def add(self, leaves: Sequence[Tensor]) -> None:
        """Take away the gradients of leaves that are no parts of logical tensors."""
        for leaf in leaves:
            if id(leaf) not in self._known and not hasattr(leaf, "is_part"):
                self._known.add(id(leaf))
                self.leaves.append(leaf)
                self._earlier.append(leaf.grad)
                leaf.grad = None

    def accumulate(self, create_graph: bool) -> None:
        """Add the new gradients to the earlier ones: in place, unless the new ones have gradients themselves."""
        for leaf, before in zip(self.leaves, self._earlier, strict=True):
            new = leaf.grad
            if before is None or new is None:
                leaf.grad = new if before is None else before
            elif create_graph:
                leaf.grad = before + new
            elif before.is_sparse and not new.is_sparse:
                leaf.grad = new + before
            else:
                before.add_(new)
                leaf.grad = before


class LogicalBackward:
    """Runs the backward passes of a script.

    Args:
        view: The ranks.
    """

    def __init__(self, view: LogicalView) -> None:
        self._view = view
        self._pass: GradientPass | None = None
        """The present pass."""

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Within the context, PyTorch's functions of gradients know of the ranks."""
        changed: list[tuple[Any, str, Any]] = [
            (torch.autograd, "backward", self.backward),
            (torch.autograd, "grad", offer_to_modes(self.grad)),
            (Tensor, "register_hook", offer_to_modes(self._register_hook())),
            (torch.autograd.Function, "apply", classmethod(self._run_whole(APPLY))),
            (apis, "vmap_impl", self._run_whole(VMAP)),
            (BackwardHook, "__init__", self._make_module_hooks()),
        ]
        HANDLERS[Tensor.backward] = self._backward_of
        try:
            with replace_attributes(*changed):
                yield
        finally:
            del HANDLERS[Tensor.backward]

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
        if TRACE_STATE.is_tracing:
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
            self._pass = GradientPass()
            try:
                self._run(self._pass, roots, gradients, asked, options)
                self._sum(self._pass.leaves)
            finally:
                self._pass.accumulate(create_graph)
                self._pass = None

    def _run(
        self,
        present: GradientPass,
        roots: list[Tensor],
        gradients: list[Tensor],
        asked: list[Tensor] | None,
        options: Mapping[str, Any],
    ) -> None:
        """Run PyTorch's backward pass; its hooks and checkpoints run functions of the script."""
        present.add(find_leaves(roots) if asked is None else asked)
        with torch._C._EnableTorchFunction():
            RUN_BACKWARD(roots, gradients, inputs=asked, **options)

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
        return move(whole, self._view.axis, tuple(root.shape), Replicate(), Partial())

    def _sum(self, leaves: Sequence[Tensor]) -> None:
        """Sum the gradients of leaves over the ranks: in place, unless they are sparse."""
        for leaf in leaves:
            if leaf.grad is not None and leaf.grad.is_sparse:
                leaf.grad = move(leaf.grad, self._view.axis, tuple(leaf.shape), Partial(), Replicate())
        dense = [leaf.grad for leaf in leaves if leaf.grad is not None and not leaf.grad.is_sparse]
        for flat, copy_back in flatten_by_kind(dense):
            flat.copy_(all_reduce(flat, among=self._view.axis))
            copy_back()

    def grad(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Run `torch.autograd.grad`; gradients of plain tensors are whole."""
        if TRACE_STATE.is_tracing:
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
        return move_with_gradient(gradient, self._view.axis, tuple(tensor.shape), Partial(), Replicate())

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
                self._view.notify_whole(function)
                args, kwargs = pytree.tree_unflatten(map(take_whole, leaves), spec)
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


def as_list(tensors: Any) -> list[Any]:
    """Return one tensor or several as a list."""
    return [tensors] if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence) else list(tensors)


def get_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor."""
    return tensor.local if isinstance(tensor, DividedTensor) else tensor


def make_first_gradient(root: Tensor) -> Tensor:
    """Return the gradient of a number by itself. Raises RuntimeError, as PyTorch does, for anything larger."""
    shape = root.logical_shape if isinstance(root, DividedTensor) else tuple(root.shape)
    if torch.Size(shape).numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones(shape, dtype=root.dtype, device=root.device)


def find_leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradients a backward pass computes."""
    found: dict[int, Tensor] = {id(root): root for root in roots if root.is_leaf and root.requires_grad}
    seen: set[Any] = set()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        waiting.extend(source for source, _ in node.next_functions if source is not None)
    return list(found.values())
