"""Let operators take the values that the job's Python has read, in place of the tensors that have them.

A program is only valid for the values that it was captured for; see Note [values that Python reads]. So an index that
Python has read, as that of an expert, is a constant: then nothing waits for the tensor but its comparison.
"""

from collections.abc import Sequence

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalValue, ProgramOutput

aten = torch.ops.aten


def use_read_values(graph: fx.Graph, outputs: Sequence[tuple[fx.Node, ProgramOutput]], returned: fx.Node) -> None:
    """Let operators take read whole numbers and truth values as constants.

    Args:
        graph: The graph of a program.
        outputs: What it returns.
        returned: Its output node.
    """
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
    is_whole = not value.dtype.is_floating_point and not value.dtype.is_complex
    return is_whole and all(isinstance(size, int) and size == 1 for size in value.shape)
