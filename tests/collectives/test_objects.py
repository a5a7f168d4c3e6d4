"""Objects between processes: typed data keeps its type, anything else needs `allow_pickle`."""

import dataclasses
import datetime
from typing import Any

import numpy
import pytest
import torch
from support.processes import on_mesh

import rankless.collectives as collectives
from rankless.errors import RanklessError
from rankless.parallel.mesh import Mesh


@dataclasses.dataclass
class Score:
    name: str
    values: list[float]


def something(rank: int) -> Any:
    """Return an object that differs in length and types between ranks."""
    return {
        "rank": rank,
        "names": ("a", "b" * rank),
        "score": Score("f1", [0.5] * rank),
        "when": datetime.date(2026, 1, 1 + rank),
        3: {1, 2, rank},
        "none": None,
    }


def all_kinds(mesh: Mesh, allow_pickle: bool) -> dict[str, Any]:
    gathered: list[Any] = [None] * mesh.size
    collectives.all_gather_object(gathered, something(mesh.rank), allow_pickle=allow_pickle)
    sent = [something(5), "second"] if mesh.rank == 1 else [None, None]
    collectives.broadcast_object_list(sent, 1, allow_pickle=allow_pickle)
    at_last: list[Any] | None = [None] * mesh.size if mesh.rank == mesh.size - 1 else None
    collectives.gather_object(something(mesh.rank), at_last, mesh.size - 1, allow_pickle=allow_pickle)
    mine: list[Any] = [None]
    parts = [something(10 + rank) for rank in range(mesh.size)] if mesh.rank == 0 else None
    collectives.scatter_object_list(mine, parts, 0, allow_pickle=allow_pickle)
    return {"all_gather": gathered, "broadcast": sent, "gather": at_last, "scatter": mine[0]}


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_receives_the_objects_of_the_others(size: int, allow_pickle: bool):
    everything = [something(rank) for rank in range(size)]
    for rank, found in enumerate(on_mesh(size, all_kinds, allow_pickle)):
        assert found["all_gather"] == everything
        assert found["broadcast"] == [something(5), "second"]
        assert found["gather"] == (everything if rank == size - 1 else None)
        assert found["scatter"] == something(10 + rank)


def arrays(mesh: Mesh) -> tuple[bool, bool, bool]:
    found: list[Any] = [None] * mesh.size
    mine = (
        torch.full((mesh.rank, 2), 1.5, dtype=torch.bfloat16),
        numpy.arange(mesh.rank, dtype="int16"),
        torch.ones(()),
    )
    collectives.all_gather_object(found, mine)
    tensor, array, number = found[1]
    return (
        tensor.dtype == torch.bfloat16 and tensor.tolist() == [[1.5, 1.5]],
        array.dtype == numpy.int16 and array.tolist() == [0],
        number.shape == () and found[0][0].shape == (0, 2),
    )


def test_tensors_and_arrays_keep_dtype_and_shape():
    assert on_mesh(2, arrays) == [(True, True, True)] * 2


class Opaque:
    def __init__(self, rank: int) -> None:
        self.rank = rank


def opaque(mesh: Mesh, allow_pickle: bool) -> Any:
    found: list[Any] = [None] * mesh.size
    collectives.all_gather_object(found, Opaque(mesh.rank), allow_pickle=allow_pickle)
    return [item.rank for item in found]


def test_objects_without_a_typed_form_need_allow_pickle():
    with pytest.raises(RanklessError, match="Opaque") as raised:
        on_mesh(2, opaque, False)
    assert "allow_pickle=True" in raised.value.fix
    assert on_mesh(2, opaque, True) == [[0, 1]] * 2
