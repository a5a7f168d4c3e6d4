"""Cut a program into two stages: the dense part, which some modules begin, and all that comes before.

Note [dense stages]: what the dense modules compute and all that follows from it is the second stage. The rest is the
first one, wherever it stands in the script: lookups in tables, pooling, and what is added to the scores of the dense
part. A lookup whose ids follow from the dense part would have to come after it, so it is refused.
"""

from collections.abc import Collection, Mapping
from operator import getitem

from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.pipeline_parallel.stages import (
    Stages,
    assign_backward,
    find_free,
    find_owners,
    list_forward,
    list_prefixes,
)
from rankless.compiler.rules.extension_operators import is_lookup
from rankless.errors import CaptureError, ConfigError

DENSE = 1
"""The number of the dense stage."""
COUNT = 2


def find_dense_stages(
    program: LogicalProgram,
    dense: Collection[str],
    names: Mapping[str, str],
    owners: Mapping[str, int],
    *,
    where: str,
) -> Stages:
    """Return the two stages of a program; see Note [dense stages].

    Args:
        program: The program.
        dense: The paths of the modules that begin the dense part, such as "model.layers".
        names: For each name of a parameter its first name, which differs if it is tied.
        owners: The stages of parameters that have one already.
        where: The line of the job, for errors.

    Raises:
        CaptureError: A lookup depends on the dense part.
        ConfigError: The program trains, and no module is marked.
    """
    if not dense and any(described.kind == "gradient" for _, described in program.outputs):
        raise ConfigError(
            expected="a dense part in each job that trains, because the run has heterogeneous workers",
            found="no module that is marked as dense",
            fix="mark the layers after all lookups: rankless.parameter_server.mark_dense(model.layers)",
            where=where,
        )
    of: dict[fx.Node, int] = {}
    for node in list_forward(program):
        if node.target is getitem:
            of[node] = of[node.all_input_nodes[0]]
            continue
        is_marked = any(path in dense for path in list_prefixes(node))
        follows = any(of.get(value) == DENSE for value in node.all_input_nodes)
        of[node] = DENSE if is_marked or follows else 0
        if of[node] == DENSE and is_lookup(node.target):
            raise CaptureError(
                expected="lookups in tables before the dense part, which heterogeneous workers compute",
                found="a lookup in it, or one whose ids follow from it",
                fix="mark only the layers after all lookups with rankless.parameter_server.mark_dense",
                where=node.meta.get("line") or where,
            )
    assign_backward(program, of, find_free(program), COUNT)
    borders = (next(iter(dense), ""),)
    return Stages(count=COUNT, of=of, owners=find_owners(program, of, COUNT, names) | dict(owners), borders=borders)
