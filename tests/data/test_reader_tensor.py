"""Tensors that some workers have read give every worker the results of plain tensors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data.test_logical_tensor import ALL_OPERATIONS, run_operation, to_comparable, whole_tensor
from support.processes import on_mesh

from rankless.data.logical_tensor import GatherMonitor
from rankless.data.tensors_on_cpu_ranks import ReaderTensor, TensorDescription, order_memory_densely
from rankless.parallel.mesh import Mesh, MeshAxis

pytestmark = pytest.mark.slow


def make_kinds(mesh: Mesh) -> Mesh:
    """Return the mesh with all ranks but 0 and 2 as heterogeneous workers."""
    others = tuple(rank for rank in range(mesh.size) if rank not in (0, 2))
    readers = tuple(rank for rank in range(mesh.size) if rank in (0, 2))
    axis = MeshAxis(
        name="pipeline",
        role="pipeline",
        rank=mesh.rank,
        size=mesh.size,
        group=mesh.group,
        stage_workers=(readers, others),
    )
    return dataclasses.replace(mesh, axes=(axis,))


def make_tensor(mesh: Mesh, whole: torch.Tensor, warnings: list[str] | None = None) -> ReaderTensor:
    monitor = GatherMonitor((warnings if warnings is not None else []).append)
    has_read = mesh.rank in mesh.axes[0].stage_workers[0]
    whole = order_memory_densely(whole)
    known = whole.clone() if has_read else TensorDescription.of(whole).make_fake()
    return ReaderTensor(known, mesh=mesh, monitor=monitor, has_value=has_read)


def run_all_operations(mesh: Mesh) -> dict[str, Any]:
    found, kinds = {}, make_kinds(mesh)
    for name, operation in ALL_OPERATIONS.items():
        try:
            found[name] = run_operation(operation, make_tensor(kinds, whole_tensor()))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 4])
def test_every_operation_gives_all_workers_the_result_of_a_plain_tensor(size):
    expected = {name: run_operation(operation, whole_tensor()) for name, operation in ALL_OPERATIONS.items()}
    for found in on_mesh(size, run_all_operations):
        assert not {name: (found[name], value) for name, value in expected.items() if found[name] != value}


CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda t: t.to("cpu", torch.float64),
    "to another": lambda t: t.to(torch.empty(0, dtype=torch.int32)),
    "to itself": lambda t: t.to(t),
    "chain": lambda t: t.double().half().clone().contiguous().cpu(),
    "channels": lambda t: t.reshape(7, 5, 1, 1).to(memory_format=torch.channels_last),
    "type": lambda t: t.type(torch.int64),
    "bool": lambda t: t.bool(),
}


def apply_casts(mesh: Mesh) -> list[str]:
    """Return the casts that are wrong, or that send values before they are needed."""
    wrong, kinds = [], make_kinds(mesh)
    for name, cast in CASTS.items():
        warnings: list[str] = []
        tensor, expected = make_tensor(kinds, whole_tensor(), warnings), cast(whole_tensor())
        found = cast(tensor)
        known = (found.shape, found.stride(), found.dtype, found.device)
        wanted = (expected.shape, expected.stride(), expected.dtype, expected.device)
        is_late = not warnings or name == "channels"  # whose reshape needs values
        if known != wanted or not is_late or to_comparable(found) != to_comparable(expected):
            wrong.append(f"{name}: {known} {warnings}")
    return wrong


def test_casts_need_no_values_and_have_the_right_ones_later():
    assert on_mesh(3, apply_casts) == [[]] * 3


TYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "complex64"]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "columns": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(3, -1, -1),
    "empty": lambda t: t[:0],
    "conjugate": lambda t: t.conj(),
}


def send_types(mesh: Mesh) -> list[str]:
    """Return the dtypes and layouts that arrive wrong."""
    wrong, kinds = [], make_kinds(mesh)
    for name in TYPES:
        for layout, change in LAYOUTS.items():
            whole = change((torch.arange(24) % 3).reshape(4, 3, 2).to(getattr(torch, name)))
            tensor = make_tensor(kinds, whole)
            if tensor.shape != whole.shape or not tensor.whole().equal(whole) or tensor.whole().dtype != whole.dtype:
                wrong.append(f"{name} {layout}")
    return wrong


def test_every_dtype_and_layout_arrives():
    assert on_mesh(3, send_types) == [[]] * 3
