"""Trace one call of a PyTorch function, with its gradients, into a logical program."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
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
from rankless.compiler.ir.ctc_operators import capture_ctc_loss
from rankless.compiler.ir.logical_program import (
    LogicalProgram,
    ProgramInput,
    ProgramOutput,
    describe_value,
    is_random_node,
)
from rankless.compiler.ir.memory_order import make_empty
from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.compiler.tracing.replaced_functions import (
    average_with_tensors,
    draw_bernoulli,
    take_paths_of_plain_run,
)
from rankless.compiler.tracing.symbolic_sizes import SymbolicSizes, is_symbolic


class TraceState(threading.local):
    """Whether this thread traces a call. PyTorch then calls functions of gradients itself."""

    is_tracing = False


TRACE_STATE = TraceState()

CALL_DECOMPOSITIONS = DECOMPOSITIONS | get_decompositions([torch.ops.aten._euclidean_dist])
"""How operators are decomposed. That of distances between more than 25 rows has no rule: it becomes matrix products."""

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)

OutputRole = Literal["result", "changed argument", "gradient"]
ResultForm = Literal["own", "copies", "detached"]
"""Whether a program returns the results of a function, or copies of them, because PyTorch traces no gradients of views
of the arguments; or nothing that has a gradient, so that the program has no backward pass."""


@dataclass(frozen=True)
class TensorKind:
    """What a trace needs to know of a tensor argument."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """The order of the dims in memory, or None for contiguous memory."""
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


TRACED_AS: dict[Any, Callable[..., Any]] = {Tensor.bernoulli_: draw_bernoulli, F.ctc_loss: capture_ctc_loss}
"""What runs in place of functions whose operators no trace or no rule takes."""


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

    @property
    def symbols(self) -> list[Any]:
        """The numbers among the arguments that are symbols, in order."""
        found: list[Any] = []
        self.map(lambda kind: kind, lambda number: found.append(number) if is_symbolic(number) else None)
        return found

    def fill(self, tensors: Sequence[Any], symbols: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors, and other values of symbols."""
        given, numbers = iter(tensors), iter(symbols)
        leaves = self.map(lambda _: next(given), lambda item: next(numbers) if is_symbolic(item) else item).leaves
        filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, self.structure)
        return filled

    def map(self, tensor: Callable[[TensorKind], Any], number: Callable[[Any], Any]) -> "CallArguments":
        """Return the same call with other tensors and other numbers, those in slices too; both in order."""

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, TensorKind):
                return tensor(leaf)
            if isinstance(leaf, slice):
                return slice(*map(convert, (leaf.start, leaf.stop, leaf.step)))
            return number(leaf) if type(leaf) in NUMBERS else leaf

        return CallArguments(leaves=tuple(map(convert, self.leaves)), structure=self.structure)


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
    lacks_gradients: bool
    """Whether a result needs a gradient, and is none of these because it is a view of an argument."""
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
        form: What it returns; see `ResultForm`.

    Attributes:
        with_gradients: The results that need gradients.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: CallArguments, changed: Sequence[int], form: ResultForm
    ) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments
        self.changed = changed
        self.form = form
        self.with_gradients: set[int] = set()
        self.leaves: list[Any] = []
        self.structure: Any = None

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Call the function, and return the tensors of its result. The inputs are tensors, then symbols."""
        count = len(self.arguments.kinds)
        given = [tensor.clone() if place in self.changed else tensor for place, tensor in enumerate(inputs[:count])]
        args, kwargs = self.arguments.fill(given, inputs[count:])
        function = TRACED_AS.get(self.function, self.function)
        if function is Tensor.__getitem__ and len(inputs) > count:
            function = get_items
        leaves, self.structure = pytree.tree_flatten(function(*args, **kwargs))
        found = {id(given[place]): ChangedArgument(place) for place in self.changed}
        self.leaves = [found.get(id(leaf), leaf) for leaf in leaves]
        results = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.with_gradients = {number for number, leaf in enumerate(results) if leaf.requires_grad}
        returned = (*results, *(given[place] for place in self.changed))
        if self.form == "copies":
            return (*(leaf.clone() for leaf in results), *returned[len(results) :])
        return tuple(leaf.detach() for leaf in returned) if self.form == "detached" else returned


def get_items(tensor: Tensor, index: Any) -> Tensor:
    """Return `tensor[index]`. PyTorch's own takes a symbol for a number that never varies."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is Ellipsis or type(item) in (slice, int, torch.SymInt) for item in items):
        return tensor[index]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    dim = 0
    for item in items:
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif item is Ellipsis:
            dim += tensor.dim() - dim - taken
            continue
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, item.start, item.stop, item.step or 1)
            taken -= 1
        else:
            tensor = tensor.select(dim, item)
            taken -= 1
            continue
        dim += 1
    return tensor


def trace_call(
    function: Callable[..., Any],
    arguments: CallArguments,
    changed: Sequence[int] = (),
    sizes: SymbolicSizes | None = None,
    *,
    form: ResultForm = "own",
) -> TracedCall:
    """Return the program of a call.

    Args:
        function: The function.
        arguments: Its arguments.
        changed: The tensor arguments whose new values the program returns as results, instead of changing them.
        sizes: Created the symbols in the arguments, if there are any.
        form: What the program returns.

    Raises:
        ChangesArguments: The function changes others too.
        Exception: PyTorch cannot trace the function; for example, a shape may depend on values.
    """
    module = CalledFunction(function, arguments, changed, form)
    fake = FakeTensorMode(shape_env=None if sizes is None else sizes.shape_env)
    with contextlib.ExitStack() as stack:
        TRACE_STATE.is_tracing = True
        stack.callback(setattr, TRACE_STATE, "is_tracing", False)
        ignored = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # those of the script, as of a checkpoint
        stack.callback(torch._C._autograd._saved_tensors_hooks_set_tracing, ignored)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(silence_trace_loggers())
        # Nothing reads these states of generators, which take a fifth of the time of a trace.
        stack.enter_context(replace_attributes((PhiloxStateTracker, "reset", lambda: None)))
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
            given = (*inputs, *arguments.symbols)
            joint = aot_export_joint_with_descriptors(stack, module, given, decompositions=CALL_DECOMPOSITIONS)
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
    inline_numbers(traced)
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
        lacks_gradients=not module.with_gradients <= set(differentiated),
        result_leaves=tuple(map(mark_leaf, module.leaves)),
        result_structure=module.structure,
    )


def inline_numbers(traced: fx.GraphModule) -> None:
    """Let an operator compute each number of which PyTorch has made a tensor, as of that in `x[:, 0] = 1.0`."""
    graph = traced.graph
    for node in graph.find_nodes(op="get_attr"):
        number = getattr(traced, node.target)
        if isinstance(number, Tensor) and number.dim() == 0:
            with unset_fake_temporarily():
                item = number.item()
            settings: dict[str, Any] = {"dtype": number.dtype, "device": number.device}
            with graph.inserting_before(node):
                computed = graph.call_function(torch.ops.aten.full.default, ([], item), settings)
            computed.meta = node.meta
            node.replace_all_uses_with(computed)
            graph.erase_node(node)


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
            case PlainAOTInput(idx=index) if index >= count:
                continue  # a symbol: `inline_sizes` removes it
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
