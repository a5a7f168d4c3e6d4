"""Gather again for the backward pass what the forward pass has gathered; see Note [sequence parallelism]."""

from dataclasses import replace

from torch import fx

from rankless.compiler.lowering.recomputation import copy_node
from rankless.compiler.sharding.redistribute import Redistribution
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Replicate, Shard


def gather_again(graph: fx.Graph, sharded: ShardedProgram, mesh: Mesh) -> None:
    """Let the backward pass of a local graph gather activations again, if the program is sequence parallel.

    Args:
        graph: The graph, which is changed.
        sharded: The program.
        mesh: The mesh for which it was lowered.
    """
    if not sharded.logical.sequence_parallel:
        return
    axes = [mesh.axes[number] for number in sharded.list_state_axes()]
    for node in list(graph.nodes):
        users = [user for user in node.users if user.meta.get("backward")]
        is_kept = not users or len(users) == len(node.users) or node.meta.get("backward")
        if is_kept or not is_gather(node) or node.target.axis not in axes:
            continue
        copy = copy_node(graph, node, users[0], {})
        copy.meta["collective"] = replace(copy.meta["collective"], backward=True)
        for user in users:
            user.replace_input_with(node, copy)


def is_gather(node: fx.Node) -> bool:
    """Return whether a node gathers what is divided along a dim."""
    target = node.target
    return (
        isinstance(target, Redistribution) and isinstance(target.source, Shard) and isinstance(target.target, Replicate)
    )
