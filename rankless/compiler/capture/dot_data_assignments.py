"""Parameters and buffers whose `.data` a job sets to another tensor.

Note [setting .data]: the tensor gets other memory, and what autograd has saved keeps the old. The trace copies the new
values into the tensor instead, and the program's caller sets `.data` to them. Both are the same training if no gradient
needs the old values, and if the new memory belongs to no other tensor. Otherwise the job is refused. A change in place
of `.data`, as `p.data.clamp_(…)`, is traced as it is: autograd uses the changed values, in the plain script too.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.tracing.refused_functions import ModuleTensors
from rankless.errors import CaptureError

aten = torch.ops.aten


@contextlib.contextmanager
def refuse_use_of_old_data(get_tensors: Callable[[], ModuleTensors]) -> Iterator[None]:
    """Within the context, autograd's error that a gradient needs the old values becomes a `CaptureError`.

    `get_tensors` returns the parameters and buffers of the latest trace.
    """
    try:
        yield
    except RuntimeError as error:
        lines = get_tensors().lines_of_set_data
        if not lines or "modified by an inplace operation" not in str(error):
            raise
        name, line = next(reversed(lines.items()))
        raise CaptureError(
            expected="a job that uses a parameter or buffer only after it has set its .data",
            found=f".data of {name} set after a use whose gradient needs the old values",
            fix="set it before the use, or after the job's call",
            where=line,
        ) from error.with_traceback(None)


def require_own_data(program: LogicalProgram, tensors: ModuleTensors) -> None:
    """Raise `CaptureError` if a job sets `.data` to memory of another tensor, because both would change together."""
    owners: dict[fx.Node, str] = {}
    for final, output in program.outputs:
        if not output.renews_memory:
            continue
        origin = find_origin(final)
        if origin in program.inputs or owners.setdefault(origin, output.name) != output.name:
            lines = [line for name, line in tensors.lines_of_set_data.items() if name.endswith(repr(output.name))]
            raise CaptureError(
                expected="a job that gives each parameter and buffer values of its own",
                found=f".data of {output.name} set to a tensor that shares memory with another",
                fix="set it to a copy: .data = other.data.clone()",
                where=lines[0] if lines else None,
            )


def find_origin(node: fx.Node) -> fx.Node:
    """Return the value that a value is a copy or a view of."""
    while node.op == "call_function" and (node.target is aten.copy.default or is_view(node)):
        node = node.all_input_nodes[-1]
    return node


def is_view(node: fx.Node) -> bool:
    """Return whether a value shares memory with the operator's input, according to its schema."""
    operator = node.target
    return isinstance(operator, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in operator._schema.returns
    )
