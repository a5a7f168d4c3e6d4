"""Trace one call of a PyTorch function, with its gradients, into a logical program."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from rankless.compiler.capture.capture import silence_trace_loggers, trace_half_precision_layouts
from rankless.compiler.capture.decompositions import CORRECTED, DECOMPOSITIONS, autograd_kernels
from rankless.compiler.capture.trace_to_program import (
    ALIAS_OPS,
    copy_graph,
    drop_copies,
    drop_double_transposes,
    inline_sizes,
    unmerge_linears,
)
from rankless.compiler.ir.logical_program import (
    LogicalProgram,
    ProgramInput,
    ProgramOutput,
    describe_value,
    is_random_node,
)
from rankless.compiler.ir.memory_order import make_empty
from rankless.compiler.tracing.replaced_functions import average_with_tensors, take_paths_of_plain_run


class TraceState(threading.local):
    """Whether this thread traces a call. PyTorch then calls functions of gradients itself."""

    is_tracing = False


TRACE_STATE = TraceState()

OutputRole = Literal["result", "changed argument", "gradient"]


@dataclass(frozen=True)
class TensorKind:
    """What a trace needs to know of a tensor argument."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """The order of the dims in memory, or None for contiguous memory."""
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class ChangesArguments(Exception):
    """A function changes tensor arguments in place, of which `trace_call` was not told.

    Args:
        numbers: The arguments.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


@dataclass(frozen=True)
class ChangedArgument:
    """Stands for a result that is an argument, changed in place."""

    number: int


@dataclass(frozen=True)
class PlainLeaf:
    """A part of a result that is no tensor."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """The arguments of a call as leaves of a tree, with a `TensorKind` in place of each tensor."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def kinds(self) -> list[TensorKind]:
        """Those of the tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorKind)]

    def fill(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorKind) else leaf for leaf in self.leaves]
        filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, self.structure)
        return filled

    def with_kinds(self, kinds: Sequence[TensorKind]) -> "CallArguments":
        """Return the same call with other tensors."""
        remaining = iter(kinds)
        leaves = tuple(next(remaining) if isinstance(leaf, TensorKind) else leaf for leaf in self.leaves)
        return CallArguments(leaves=leaves, structure=self.structure)


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """The program of a call.

    Its inputs are the tensor arguments, then the gradients of some results. Its outputs are results, the new values of
    arguments that the function changes in place, and gradients of arguments.
    """

    program: LogicalProgram
    arguments: int
    """The number of tensor arguments."""
    roles: tuple[tuple[OutputRole, int], ...]
    """For each output what it is, and the number of the result or argument."""
    differentiated: tuple[int, ...]
    """The results whose gradients are inputs, in the order of these inputs."""
    result_leaves: tuple[ChangedArgument | PlainLeaf | None, ...]
    """The leaves of what the function returns, None for each tensor that is no argument."""
    result_structure: pytree.TreeSpec

    def find_outputs(self, role: OutputRole) -> dict[int, fx.Node]:
        """Return the outputs with a role by the numbers of their results or arguments."""
        pairs = zip(self.program.outputs, self.roles, strict=True)
        return {number: node for (node, _), (found, number) in pairs if found == role}


class CalledFunction(nn.Module):
    """A call as a module, the form in which PyTorch traces.

    Args:
        function: The function.
        arguments: Its arguments.
        changed: The tensor arguments that it changes in place. It gets copies, which become further results.
    """

    def __init__(self, function: Callable[..., Any], arguments: CallArguments, changed: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments
        self.changed = changed
        self.leaves: list[Any] = []
        self.structure: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the function, and return the tensors of its result."""
        given = [tensor.clone() if place in self.changed else tensor for place, tensor in enumerate(tensors)]
        args, kwargs = self.arguments.fill(given)
        leaves, self.structure = pytree.tree_flatten(self.function(*args, **kwargs))
        found = {id(given[place]): ChangedArgument(place) for place in self.changed}
        self.leaves = [found.get(id(leaf), leaf) for leaf in leaves]
        results = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return (*results, *(given[place] for place in self.changed))


def trace_call(function: Callable[..., Any], arguments: CallArguments, changed: Sequence[int] = ()) -> TracedCall:
    """Return the program of a call.

    Args:
        function: The function.
        arguments: Its arguments.
        changed: The tensor arguments whose new values the program returns as results, instead of changing them.

    Raises:
        ChangesArguments: The function changes others too.
        Exception: PyTorch cannot trace the function; for example, a shape may depend on values.
    """
    module = CalledFunction(function, arguments, changed)
    fake = FakeTensorMode()
    with contextlib.ExitStack() as stack:
        TRACE_STATE.is_tracing = True
        stack.callback(setattr, TRACE_STATE, "is_tracing", False)
        ignored = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # those of the script, as of a checkpoint
        stack.callback(torch._C._autograd._saved_tensors_hooks_set_tracing, ignored)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(silence_trace_loggers())
        stack.enter_context(trace_half_precision_layouts())
        with fake:
            inputs = [
                make_empty(kind.shape, kind.order, dtype=kind.dtype, device=kind.device).requires_grad_(
                    kind.requires_grad and torch.is_grad_enabled()
                )
                for kind in arguments.kinds
            ]
        with (
            autograd_kernels(CORRECTED),
            take_paths_of_plain_run(),
            average_with_tensors(),
            torch._C.DisableTorchFunctionSubclass(),
        ):
            joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs), decompositions=DECOMPOSITIONS)
        return make_program(joint.graph_module, module, len(inputs))


def make_program(traced: fx.GraphModule, module: CalledFunction, count: int) -> TracedCall:
    """Return the program in a traced graph, whose placeholders and outputs carry PyTorch's descriptors."""
    graph = traced.graph
    returned: Any = graph.output_node()
    descriptors = [
        descriptor
        for value, descriptor in zip(returned.args[0], returned.meta["desc"], strict=True)
        if isinstance(value, fx.Node)
    ]
    changes = (item.mutated_input for item in descriptors if isinstance(item, InputMutationAOTOutput))
    if new := tuple(item.idx for item in changes if isinstance(item, PlainAOTInput)):
        raise ChangesArguments(new)
    inputs, differentiated = name_inputs(graph, count)
    inline_sizes(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ALIAS_OPS:
            node.replace_all_uses_with(node.args[0])
    returned.args = (tuple(value for value in returned.args[0] if isinstance(value, fx.Node)),)
    drop_double_transposes(graph)
    drop_copies(graph)
    unmerge_linears(graph)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_random_node(node))
    results = sum(isinstance(leaf, Tensor) for leaf in module.leaves)
    roles = tuple(find_role(descriptor, results, module.changed) for descriptor in descriptors)
    copy, copies = copy_graph(graph)
    outputs = tuple(
        (copies[node], ProgramOutput(kind="result", name=f"{role} {number}", index=index))
        for index, (node, (role, number)) in enumerate(zip(returned.args[0], roles, strict=True))
    )
    named = {copies[node]: described for node, described in inputs.items() if node in copies}
    name = getattr(module.function, "__name__", "call")
    return TracedCall(
        program=LogicalProgram(name=name, graph=copy, inputs=named, outputs=outputs),
        arguments=count,
        roles=roles,
        differentiated=tuple(differentiated),
        result_leaves=tuple(map(mark_leaf, module.leaves)),
        result_structure=module.structure,
    )


def mark_leaf(leaf: Any) -> ChangedArgument | PlainLeaf | None:
    """Return what stands for a leaf of a result in a plan."""
    if isinstance(leaf, Tensor):
        return None
    return leaf if isinstance(leaf, ChangedArgument) else PlainLeaf(leaf)


def name_inputs(graph: fx.Graph, count: int) -> tuple[dict[fx.Node, ProgramInput], list[int]]:
    """Return the inputs of a traced graph, and the results whose gradients are among them; clear its metadata.

    Args:
        graph: The graph.
        count: The number of tensor arguments. Gradients come after them.
    """
    inputs: dict[fx.Node, ProgramInput] = {}
    differentiated: list[int] = []
    for node in graph.nodes:
        descriptor = node.meta.get("desc")
        node.meta = {
            "line": "",
            "module": None,
            "backward": node.meta.get("partitioner_tag") == "is_backward",
            "checkpoint": None,
            "kept": False,
            "val": describe_value(node.meta.get("val")),
        }
        if node.op != "placeholder":
            continue
        match descriptor:
            case PlainAOTInput(idx=index):
                inputs[node] = ProgramInput(kind="argument", name=f"argument {index}", index=index)
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                place = count + len(differentiated)
                inputs[node] = ProgramInput(kind="argument", name=f"gradient of result {index}", index=place)
                differentiated.append(index)
            case _:
                raise NotImplementedError(f"an input of kind {type(descriptor).__name__}")
    return inputs, differentiated


def find_role(descriptor: Any, results: int, changed: Sequence[int]) -> tuple[OutputRole, int]:
    """Return what an output of a traced graph is.

    Args:
        descriptor: PyTorch's descriptor.
        results: The number of results. Copies of `changed` arguments come after them.
        changed: The arguments.
    """
    match descriptor:
        case PlainAOTOutput(idx=index) if index >= results:
            return "changed argument", changed[index - results]
        case PlainAOTOutput(idx=index):
            return "result", index
        case GradAOTOutput(grad_of=PlainAOTInput(idx=index)):
            return "gradient", index
    raise NotImplementedError(f"an output of kind {type(descriptor).__name__}")
