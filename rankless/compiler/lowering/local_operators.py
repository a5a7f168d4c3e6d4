"""What runs in place of an operator on local values, and the memory layouts that operators expect."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import custom_ops
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order, find_repeated_dims, order_memory, repeat_memory
from rankless.compiler.rules.extension_operators import find_operator
from rankless.compiler.rules.strategy import GraphBuilder
from rankless.compiler.sequence_parallel import attention_kernels
from rankless.compiler.tracing.symbolic_sizes import size_hint

aten = torch.ops.aten
rankless_ops = torch.ops.rankless

LOCAL_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,  # a gathered or reduced value may have other strides than the logical one
    aten._unsafe_view.default: aten.reshape.default,
    rankless_ops.linear.default: custom_ops.run_linear,
    rankless_ops.linear_weight.default: custom_ops.run_linear_weight,
    rankless_ops.recurrent.default: custom_ops.run_recurrent,
    rankless_ops.recurrent_backward.default: custom_ops.run_recurrent_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_kernels.run_cpu_attention,
}
"""Operators, and the functions that run in their place."""


def find_local(operator: Any) -> Any:
    """Return the function that runs in place of an operator on local values: itself if there is no other."""
    added = find_operator(operator)
    return LOCAL_OPERATORS.get(operator, operator) if added is None else added.local


def restore_layout(builder: GraphBuilder, moved: fx.Node, logical: LogicalValue) -> fx.Node:
    """Return a value that a collective has made contiguous in its traced order; see Note [memory layout]."""
    shape, strides = ([int(size_hint(item)) for item in sizes] for sizes in (logical.shape, logical.strides))
    repeated = find_repeated_dims(shape, strides)
    order = find_memory_order([1 if dim in repeated else size for dim, size in enumerate(shape)], strides)
    if repeated:
        return builder.call(repeat_memory, moved, repeated, order)
    return moved if order is None else builder.call(order_memory, moved, order)
