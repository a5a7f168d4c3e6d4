"""Copy results that lie in memory of parameters which workers share: the next step changes it.

A gathered parameter is fresh in each call, and a program that returns it may as well return its memory. Shared memory
of parameters must not leave the program; see Note [pieces in one memory]. Gradients have memory of their own already.
"""

from collections.abc import Mapping
from operator import getitem

import torch
from torch import Tensor, fx

from rankless.compiler.lowering.local_graph import LocalGraph


def copy_shared_results(local: LocalGraph, shared: Mapping[fx.Node, int]) -> None:
    """Let a local graph return copies of the results that lie in shared memory.

    Args:
        local: The graph, whose outputs change.
        shared: The inputs that lie in shared memory, and the number of the memory of each.
    """
    one_of_each = {memory: node for node, memory in shared.items()}
    output = next(node for node in local.graph.nodes if node.op == "output")
    values = list(output.args[0])
    places = [place for place, (_, described) in enumerate(local.outputs) if described.kind != "gradient"]
    if not one_of_each or not places:
        return
    with local.graph.inserting_before(output):
        results = [values[place] for place in places]
        copied = local.graph.call_function(copy_if_shared, (results, list(one_of_each.values())))
        for number, place in enumerate(places):
            values[place] = local.graph.call_function(getitem, (copied, number))
    output.args = (tuple(values),)


def copy_if_shared(results: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
    """Return results, and copies of those that lie in the memory of one of some tensors."""
    memories = {item.untyped_storage().data_ptr() for item in shared}
    return [item if get_memory(item) not in memories else copy_with_strides(item) for item in results]


def get_memory(value: Tensor) -> int | None:
    """Return the address of a tensor's memory; None for a sparse one."""
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else None


def copy_with_strides(value: Tensor) -> Tensor:
    """Return a copy in memory of its own, with the same strides even if they leave gaps or repeat elements."""
    if not value.numel():
        return value.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride(), 0)
