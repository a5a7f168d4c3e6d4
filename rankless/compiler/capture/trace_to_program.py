"""Convert the graph that PyTorch traced into a logical program: name inputs and outputs, remove redundant nodes.

A program is only valid for the values that it was captured for; see Note [values that Python reads]. So operators take
an index that Python has read, as that of an expert, as a constant: then nothing waits for the tensor but its
comparison.

Scripts write `x[chosen == expert]` and `weights[chosen == expert]` one after the other. The rows of both are divided
alike only if the program shows that the mask is the same, so equal masks are merged; see Note [selections of divided
rows].

Note [unmerged linears]: `nn.MultiheadAttention` computes time-first, and merges time and batch before its output
projection. A batch dim that is merged behind another cannot be sharded. `linear` takes any leading dims, so the merge
is not needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from rankless.compiler.ir.local_kernels import GeneratorStart
from rankless.compiler.ir.logical_program import (
    LogicalProgram,
    LogicalValue,
    ProgramInput,
    ProgramOutput,
    describe_value,
    is_fresh,
    is_random_node,
)
from rankless.compiler.ir.operator_origin import decode_origin
from rankless.compiler.tracing.refused_tensor_functions import ModuleTensors, refuse_other_name
from rankless.compiler.tracing.symbolic_sizes import find_traced_count, is_same, is_symbolic, list_traced_counts
from rankless.errors import CaptureError

aten = torch.ops.aten
KEPT = frozenset(CheckpointPolicy) - {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}
"""What a selective checkpoint of the script says of values that it keeps."""
ALIAS_OPS = (aten.detach.default, aten.alias.default)


def name_inputs_and_outputs(
    name: str,
    line: str,
    graph_module: fx.GraphModule,
    tensors: ModuleTensors,
    generators: Sequence[torch.Generator],
) -> LogicalProgram:
    """Return the program in a traced graph whose placeholders and outputs carry PyTorch's descriptors.

    Operators that Rankless adds (the mean of losses per sample, a result's copy) get the job's own `line`.
    """
    graph = graph_module.graph
    returned: Any = graph.output_node()
    (values,) = returned.args
    described_outputs = [
        make_output(descriptor, find_line(value) if isinstance(value, fx.Node) else None, tensors)
        for value, descriptor in zip(values, returned.meta["desc"], strict=True)
    ]
    inputs: dict[fx.Node, ProgramInput] = {}
    for node in list(graph.nodes):
        value, descriptor = describe_value(node.meta.get("val")), node.meta.get("desc")
        # Drop all other metadata: the trace's fake tensors would live as long as the program.
        origin = decode_origin(node.meta.get("stack_trace"))
        node.meta = {
            "line": origin.line or line,
            "module": origin.module,
            "backward": node.meta.get("partitioner_tag") == "is_backward",
            "checkpoint": origin.checkpoint,
            "kept": node.meta.get("recompute") in KEPT,
            "val": value,
            "desc": descriptor,
        }
        if node.op == "placeholder":
            program_input = make_input(node.meta["desc"])
            if program_input is None:
                replace_tangent(node)
            else:
                inputs[node] = program_input
        elif node.op == "get_attr":
            inputs[node] = make_constant_input(node, graph_module, tensors)
        elif origin.generator is not None and is_random_node(node):
            node.meta["generator"] = generators[origin.generator]
    inline_sizes(graph)
    (values,) = returned.args
    outputs = tuple(
        (value, output)
        for value, output in zip(values, described_outputs, strict=True)
        if isinstance(value, fx.Node) and output is not None
    )
    return LogicalProgram(name=name, graph=graph, inputs=inputs, outputs=outputs)


def add_generator_starts(graph: fx.Graph, starts: Mapping[torch.Generator, GeneratorStart]) -> None:
    """Note at the first draw from each forked generator how it gets its state."""
    started = set[torch.Generator]()
    for node in graph.nodes:
        generator = node.meta.get("generator")
        if generator not in starts or generator in started:
            continue
        start = starts[generator]
        while start.parent is not None and start.parent not in started:
            start = starts[start.parent]  # nothing has been drawn from the fork around this one
        node.meta["start"] = start
        started.add(generator)


def name_checks(program: LogicalProgram, values: Sequence[Any]) -> LogicalProgram:
    """Return the program with its last results as checks of these values; see Note [values that Python reads]."""
    results = sum(output.kind == "result" for _, output in program.outputs)
    count = len(values)

    def name(output: ProgramOutput) -> ProgramOutput:
        number = output.index - (results - count)
        return ProgramOutput(kind="check", name=f"check {number}", index=number, expected=values[number])

    return replace(
        program,
        outputs=tuple(
            (node, name(output) if output.kind == "result" and output.index >= results - count else output)
            for node, output in program.outputs
        ),
    )


def inline_sizes(graph: fx.Graph) -> None:
    """Replace nodes that compute sizes by the sizes themselves, which are known before the program runs."""
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda item: item.meta["val"] if is_symbolic(item.meta.get("val")) else item
        )
    computed = [node for node in graph.nodes if is_symbolic(node.meta.get("val"))]
    for node in reversed(computed):
        graph.erase_node(node)


def make_input(descriptor: Any) -> ProgramInput | None:
    """Return the program input of a placeholder; None for the gradient of an output."""
    match descriptor:
        case ParamAOTInput(target=target):
            return ProgramInput(kind="parameter", name=target)
        case BufferAOTInput(target=target):
            return ProgramInput(kind="buffer", name=target)
        case PlainAOTInput(idx=index):
            return ProgramInput(kind="argument", name=f"argument {index}", index=index)
        case TangentAOTInput(output=PlainAOTOutput(idx=0) | InputMutationAOTOutput()):
            return None
        case ForwardTokenAOTInput():
            raise CaptureError(
                expected="operators without side effects",
                found="an operator that also raises errors or prints while it runs, as torch.linalg.solve and inv do",
                fix="use another (torch.linalg.solve_ex, inv_ex, cholesky_ex), or compute it outside the job",
            )
    raise CaptureError(
        expected="a program of parameters, buffers and tensor arguments",
        found=f"an input of kind {type(descriptor).__name__}",
        fix="report this with the job that caused it",
    )


def make_output(descriptor: Any, line: str | None, tensors: ModuleTensors) -> ProgramOutput | None:
    """Return the program output of a traced output; None for an output that nothing reads.

    Raises `CaptureError` for an argument that is changed in place.

    `line` is the line of the operator that computes it, for errors.
    """
    match descriptor:
        case PlainAOTOutput(idx=index):
            return ProgramOutput(kind="result", name=f"result {index}", index=index)
        case GradAOTOutput(grad_of=ParamAOTInput(target=target)):
            return ProgramOutput(kind="gradient", name=target)
        case InputMutationAOTOutput(
            mutated_input=BufferAOTInput(target=target) | ParamAOTInput(target=target) as state
        ):
            kind = "buffer" if isinstance(state, BufferAOTInput) else "parameter"
            renews = f"{kind} {target!r}" in tensors.lines_of_set_data
            return ProgramOutput(kind="mutation", name=target, renews_memory=renews)
        case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
            raise CaptureError(
                expected="a job that does not change its arguments",
                found=f"tensor argument {index} is changed in place",
                fix="work on a copy: argument = argument.clone()",
                where=line or None,
            )
    return None


def replace_tangent(node: fx.Node) -> None:
    """Replace the placeholder for the gradient of an output: one for the loss, zero for a parameter's new value."""
    value: LogicalValue = node.meta["val"]
    number = 1.0 if isinstance(node.meta["desc"].output, PlainAOTOutput) else 0.0
    for user in list(node.users) if number == 0 else ():
        if user.target is aten.add.Tensor and not user.kwargs:  # autograd adds it to the parameter's gradient
            (other,) = [item for item in user.all_input_nodes if item is not node]
            user.replace_all_uses_with(other)
            user.graph.erase_node(user)
    with node.graph.inserting_before(node):
        settings: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        constant = node.graph.call_function(aten.full.default, (list(value.shape), number), settings)
    constant.meta.update(node.meta)
    node.replace_all_uses_with(constant)
    node.graph.erase_node(node)


def make_constant_input(node: fx.Node, graph_module: fx.GraphModule, tensors: ModuleTensors) -> ProgramInput:
    """Return an input for a tensor that the job read from its surroundings.

    Raises `CaptureError` for a parameter whose gradient would be lost. The job may use one under `torch.no_grad()`.
    """
    constant = getattr(graph_module, str(node.target))
    if not isinstance(constant, Tensor):
        raise CaptureError(
            expected="random operators that take a generator of the script as generator=",
            found=f"an operator with a {type(constant).__name__} at another place",
            fix="pass it as generator=, or draw outside the job and pass the numbers as an argument",
            where=", ".join(sorted({find_line(user) for user in node.users})),
        )
    if tensors.is_differentiated(constant):
        users = {find_line(user) for user in node.users}
        own = tensors.describe_original(constant)
        if own is not None:
            raise refuse_other_name(own).add_location(", ".join(sorted(users)))
        raise CaptureError(
            expected="every parameter that the job uses to belong to a module passed as model=",
            found=f"a parameter of shape {list(constant.shape)} of a module that was not passed",
            fix="pass the module too: @rankless.job(model=[model, other], …)",
            where=", ".join(sorted(users)),
        )
    node.meta["val"] = describe_value(constant)
    return ProgramInput(kind="constant", name=str(node.target), constant=constant)


def find_line(node: fx.Node) -> str:
    """Return the script's line of a node, whose metadata may still be the trace's."""
    return decode_origin(node.meta.get("stack_trace")).line or str(node.meta.get("line", ""))


def clean_up(program: LogicalProgram, modules: Mapping[str, nn.Module], *, compares: bool = True) -> LogicalProgram:
    """Return the same program with tied parameters as one input, and without aliases, final copies or unused nodes.

    Args:
        compares: Whether the program compares the values that Python has read.
    """
    replacements: dict[fx.Node, fx.Node] = {}
    inputs = tie_inputs(program, modules, replacements)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in ALIAS_OPS:
            replacements[node] = node.args[0]
            node.replace_all_uses_with(node.args[0])
    outputs = [(resolve(node, replacements), output) for node, output in program.outputs]
    outputs = add_tied_gradients(program.graph, outputs, named_tensors(modules))
    outputs = [
        (skip_final_copy(node) if output.kind in ("result", "check") else node, output) for node, output in outputs
    ]
    returned: Any = program.graph.output_node()
    use_read_values(program.graph, outputs, returned)
    outputs = [(node, output) for node, output in outputs if compares or output.kind != "check"]
    returned.args = (tuple(node for node, _ in outputs),)
    drop_double_transposes(program.graph)
    drop_copies(program.graph)
    unmerge_linears(program.graph)
    merge_selections(program)
    outputs = [(node, output) for node, (_, output) in zip(returned.args[0], outputs, strict=True)]
    needed = find_needed_counts(program.graph)
    program.graph.eliminate_dead_code(
        # Unused random operators stay: in the plain script they advance the generator.
        lambda node: node.op in ("placeholder", "output") or is_random_node(node) or node in needed
    )
    copy, copies = copy_graph(program.graph)
    return LogicalProgram(
        name=program.name,
        graph=copy,
        inputs={copies[node]: program_input for node, program_input in inputs.items() if node in copies},
        outputs=tuple((copies[node], output) for node, output in outputs),
    )


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copy a graph node by node, without the erased nodes of the trace and the fake tensors that they hold."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        # Set the arguments afterwards: PyTorch warns about sizes among the arguments of a new node.
        new = copy.create_node(node.op, node.target, name=node.name)
        new.args, new.kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        new.meta = dict(node.meta)
        copies[node] = new
    return copy, copies


def drop_double_transposes(graph: fx.Graph) -> None:
    """Remove pairs of transposes; autograd leaves such a pair behind every weight's gradient."""
    for node in graph.nodes:
        if node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])


def find_needed_counts(graph: fx.Graph) -> set[fx.Node]:
    """Return the values from which a program takes counts of selected rows that are sizes in its arguments."""
    used = {
        count
        for node in graph.nodes
        for item in pytree.tree_leaves((node.args, node.kwargs))
        for count in list_traced_counts(item)
    }
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes if used else ():
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, LogicalValue) else ():
            if (count := find_traced_count(size)) in used:
                found.setdefault(count, node)
    return set(found.values())


def resolve(node: fx.Node, replacements: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Follow replacements to the node that is in the graph now."""
    while node in replacements:
        node = replacements[node]
    return node


def tie_inputs(
    program: LogicalProgram, modules: Mapping[str, nn.Module], replacements: dict[fx.Node, fx.Node]
) -> dict[fx.Node, ProgramInput]:
    """Merge the inputs of parameters that are the same tensor under several names."""
    tensors = named_tensors(modules)
    first: dict[int, fx.Node] = {}
    inputs = {}
    for node, program_input in program.inputs.items():
        tensor = (
            tensors.get(program_input.name) if program_input.kind in ("parameter", "buffer") else program_input.constant
        )
        known = node if tensor is None else first.setdefault(id(tensor), node)
        if known is node:
            inputs[node] = program_input
        else:
            replacements[node] = known
            node.replace_all_uses_with(known)
    for node in replacements:
        program.graph.erase_node(node)
    return inputs


def named_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers of all modules, tied ones under each of their names."""
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        found |= dict(module.named_parameters(name, remove_duplicate=False))
        found |= dict(module.named_buffers(name, remove_duplicate=False))
    return found


def add_tied_gradients(
    graph: fx.Graph, outputs: list[tuple[fx.Node, ProgramOutput]], tensors: Mapping[str, Tensor]
) -> list[tuple[fx.Node, ProgramOutput]]:
    """Return the outputs with one gradient per parameter tensor: the sum of the gradients under all its names."""
    returned: Any = graph.output_node()
    added: dict[object, tuple[fx.Node, ProgramOutput]] = {}
    for node, output in outputs:
        key = id(tensors[output.name]) if output.kind == "gradient" else output
        if key not in added:
            added[key] = (node, output)
            continue
        first, kept = added[key]
        with graph.inserting_before(returned):
            total = graph.call_function(aten.add.Tensor, (first, node))
        total.meta.update(node.meta)
        added[key] = (total, kept)
    return list(added.values())


def use_read_values(graph: fx.Graph, outputs: Sequence[tuple[fx.Node, ProgramOutput]], returned: fx.Node) -> None:
    """Let operators take read whole numbers and truth values as constants."""
    for node, output in outputs:
        value, known = node.meta["val"], output.expected
        read = node.all_input_nodes[0] if node.target is aten.clone.default else node  # a copy of a view is returned
        users = [user for user in read.users if user is not returned and user is not node]
        if output.kind != "check" or not users or not isinstance(known, int) or not is_single_number(value):
            continue
        with graph.inserting_before(min(users)):
            constant = graph.call_function(
                aten.full.default, ([1] * len(value.shape), known), {"dtype": value.dtype, "device": value.device}
            )
        constant.meta.update(node.meta, backward=False)
        for user in users:
            user.replace_input_with(read, constant)


def is_single_number(value: LogicalValue) -> bool:
    """Return whether a value is one whole number or truth value."""
    return is_whole_number(value.dtype) and all(isinstance(size, int) and size == 1 for size in value.shape)


def skip_final_copy(node: fx.Node) -> fx.Node:
    """Return the value behind a result's last copy, if that value owns its memory and is no view."""
    if node.target is not aten.clone.default:
        return node
    (source,) = node.all_input_nodes
    return source if is_fresh(source) else node


def drop_copies(graph: fx.Graph) -> None:
    """Let operators take a copied value itself, as dropout with probability 0 copies it.

    A copy stays if its layout is another one, or if the program may return it or a view of it: what a program returns
    shares no memory.
    """
    for node in graph.nodes:
        if node.target is aten.clone.default and is_needless(node):
            node.replace_all_uses_with(node.args[0])


def is_needless(copy: fx.Node) -> bool:
    """Return whether a copy has the layout of its source, and only operators with memory of their own take it."""
    (source,) = copy.all_input_nodes
    value, copied = source.meta["val"], copy.meta["val"]
    return (
        is_fresh(source)
        and not copy.meta.get("kept")
        and not value.is_sparse
        and is_same(value.strides, copied.strides)
        and all(is_fresh(user) and user.target is not aten._unsafe_view.default for user in copy.users)
    )


WRITES = (aten.index_put.default, aten.index_put_.default)


def merge_selections(program: LogicalProgram) -> None:
    """Merge equal masks and numbers of rows of a program, and let zeros that it writes to rows be one number."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    if not any(list_traced_counts(size) for item in values if isinstance(item, LogicalValue) for size in item.shape):
        return
    known: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.target in WRITES and len(node.args) == 3:
            write_one_zero(node)
        if not is_discrete(node):
            continue
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, str(spec), tuple(item if isinstance(item, fx.Node) else repr(item) for item in leaves))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def is_discrete(node: fx.Node) -> bool:
    """Return whether a node computes truth values or whole numbers, in the same way each time."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple) else (value,)
    is_operator = node.target is getitem or (str(node.target).startswith("aten.") and not is_random_node(node))
    return is_operator and all(isinstance(item, LogicalValue) and is_whole_number(item.dtype) for item in values)


def is_whole_number(dtype: torch.dtype) -> bool:
    """Return whether a dtype is of truth values or whole numbers."""
    return not (dtype.is_floating_point or dtype.is_complex)


def write_one_zero(node: fx.Node) -> None:
    """Replace rows of zeros that a node writes by one zero, which needs no number of rows."""
    zeros = node.args[2]
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.zeros.default:
        return
    value = zeros.meta["val"]
    with node.graph.inserting_before(node):
        zero = node.graph.call_function(aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device})
    zero.meta = {**zeros.meta, "val": LogicalValue((), (), value.dtype, value.device)}
    node.update_arg(2, zero)


rankless_ops = torch.ops.rankless

VIEWS = (aten.view.default, aten._unsafe_view.default)


def unmerge_linears(graph: fx.Graph) -> None:
    """Let `linear`, and its gradients, take values whose leading dims are not merged: see Note [unmerged linears]."""
    for node in list(graph.nodes):
        if node.target is rankless_ops.linear.default:
            unmerge_linear(node)
        elif node.target is rankless_ops.linear_weight.default:
            unmerge_weight_gradient(node)
        elif node.target is aten.sum.dim_IntList:
            unmerge_sum(node)


def unmerge_linear(node: fx.Node) -> None:
    """Merge the dims of the result instead of those of the input; views that divide them again need no merge."""
    value, view = node.meta["val"], find_merging_view(node.args[0])
    leading = None if view is None else find_leading_dims(view, node)
    if view is None or leading is None:
        return
    shape = (*leading, value.shape[-1])
    arguments = (unmerge(view, leading), *node.args[1:])
    wide = insert_call(node, node.target, arguments, make_contiguous(value, shape))
    merged = insert_call(node, aten.view.default, (wide, list(value.shape)), value)
    node.replace_all_uses_with(merged)
    for user in list(merged.users):
        if user.target in VIEWS and is_same(user.meta["val"].shape, shape):
            user.replace_all_uses_with(wide)
        elif user.target in VIEWS:
            user.replace_input_with(merged, wide)


def unmerge_weight_gradient(node: fx.Node) -> None:
    """Compute a weight's gradient from unmerged values."""
    grad, x = (find_merging_view(argument) for argument in node.args)
    if grad is not None and x is not None:
        leading = find_leading_dims(grad) or find_leading_dims(x)
        if leading is not None:
            node.args = (unmerge(grad, leading), unmerge(x, leading))


def unmerge_sum(node: fx.Node) -> None:
    """Sum a bias's gradient over the unmerged dims instead of the merged one."""
    value, dims, *rest = node.args
    view = find_merging_view(value)
    leading = None if view is None else find_leading_dims(view)
    if view is None or leading is None or dims != [0] or any(rest) or node.kwargs.get("keepdim"):
        return
    node.args = (unmerge(view, leading), list(range(len(leading))), *rest)


def find_merging_view(value: Any) -> fx.Node | None:
    """Return a value if it is a view of more dims as rows and features; otherwise None."""
    if not isinstance(value, fx.Node) or value.target not in VIEWS:
        return None
    (source,) = value.all_input_nodes
    return value if len(value.meta["val"].shape) == 2 < len(source.meta["val"].shape) else None


def find_leading_dims(view: fx.Node, result: fx.Node | None = None) -> tuple[int, ...] | None:
    """Return the dims that a view merges to rows, from its source or from a view that divides the result again."""
    (source,) = view.all_input_nodes
    before, after = source.meta["val"].shape, view.meta["val"].shape
    if is_same(before[-1:], after[-1:]):
        return tuple(before[:-1])
    if result is None:
        return None
    features = result.meta["val"].shape[-1:]
    divided = [tuple(user.meta["val"].shape) for user in result.users if user.target in VIEWS]
    return next((shape[:-1] for shape in divided if len(shape) > 2 and is_same(shape[-1:], features)), None)


def unmerge(view: fx.Node, leading: tuple[int, ...]) -> fx.Node:
    """Return the value of a merging view with these leading dims in place of rows."""
    (source,) = view.all_input_nodes
    shape = (*leading, view.meta["val"].shape[-1])
    if is_same(source.meta["val"].shape, shape):
        return source
    return insert_call(view, aten.view.default, (source, list(shape)), make_contiguous(view.meta["val"], shape))


def insert_call(before: fx.Node, target: Any, args: tuple[Any, ...], value: LogicalValue) -> fx.Node:
    """Insert an operator in front of a node, with that node's origin."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target)
    # Set the arguments afterwards: PyTorch warns about sizes among the arguments of a new node.
    node.args = args
    node.meta = {**before.meta, "val": value}
    return node


def make_contiguous(value: LogicalValue, shape: tuple[int, ...]) -> LogicalValue:
    """Return the value in another shape, contiguous."""
    strides: list[int] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return replace(value, shape=shape, strides=tuple(strides))
