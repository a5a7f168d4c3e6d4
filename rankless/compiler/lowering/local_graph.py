"""One rank's program as a graph on local values: what lowering returns, and scheduling changes."""

from dataclasses import dataclass
from operator import getitem

from torch import fx

from rankless.compiler.ir.logical_program import ProgramInput, ProgramOutput
from rankless.compiler.sharding.redistribute import CollectiveRecord


@dataclass(frozen=True, kw_only=True)
class LocalGraph:
    """One rank's program as a graph on local values.

    Its collectives carry a `CollectiveRecord` as `meta["collective"]`. Gradients may still be partial sums:
    `pending_gradients` names those that `schedule_gradients` reduces.
    """

    graph: fx.Graph
    inputs: tuple[tuple[fx.Node, ProgramInput], ...]
    outputs: tuple[tuple[fx.Node, ProgramOutput], ...]
    pending_gradients: tuple[fx.Node, ...]

    @property
    def recomputed(self) -> int:
        """The number of operators of the forward pass that the backward pass computes again."""
        return sum("repeats" in node.meta and node.target is not getitem for node in self.graph.nodes)

    @property
    def collectives(self) -> tuple[CollectiveRecord, ...]:
        """All collectives, in the order in which the program starts them."""
        return tuple(node.meta["collective"] for node in self.graph.nodes if "collective" in node.meta)
