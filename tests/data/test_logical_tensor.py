"""Outside jobs a logical tensor behaves as the whole tensor in PyTorch, NumPy and Python."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from data.logical_operations import CHANGING, COMPUTING, READING
from support.processes import on_mesh

from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard, split_lengths
from rankless.user_code import display_name

pytestmark = pytest.mark.slow


def whole_tensor() -> torch.Tensor:
    return torch.arange(35.0).reshape(7, 5) - 11


def make_logical_tensor(
    mesh: Mesh, whole: torch.Tensor, warnings: list[str] | None = None, dim: int = 0
) -> LogicalTensor:
    placement = Shard(dim, split_lengths(whole.shape[dim], mesh.size))
    local = whole.narrow(dim, placement.start(mesh.rank), placement.lengths[mesh.rank]).clone()
    monitor = GatherMonitor((warnings if warnings is not None else []).append)
    return LogicalTensor(local, placement=placement, mesh=mesh, monitor=monitor)


def save_and_load(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def compute_gradient(tensor: torch.Tensor) -> torch.Tensor:
    tensor.requires_grad_()
    (tensor * tensor).sum().backward()
    return tensor.grad


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "repr": repr,
    "format": "{}".format,
    "item": lambda t: t[2, 3].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": numpy.asarray,
    "numpy function": lambda t: numpy.concatenate([t, t]),
    "iteration": lambda t: [row.sum().item() for row in t],
    "last row": lambda t: t[-1],
    "mask": lambda t: t[t > 0],
    "list index": lambda t: t[[0, 6]],
    "contains": lambda t: 3.0 in t,
    "comparison": lambda t: (t == t).all().item(),
    "truth": lambda t: bool(t.sum() > 0),
    "property": lambda t: t.T,
    "data": lambda t: t.data,
    "stack": lambda t: torch.stack([t, t + 1]),
    "reflected": lambda t: torch.ones(7, 5) - t,
    "in place on another": lambda t: torch.ones(7, 5).add_(t),
    "out": lambda t: torch.mul(t, 2, out=torch.empty(0)),
    "linear": lambda t: F.linear(t, torch.ones(2, 5)),
    "module": lambda t: torch.nn.BatchNorm1d(5)(t),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "gradient": compute_gradient,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": save_and_load,
    "length": len,
    "shape": lambda t: (t.shape, t.size(0), t.dim(), t.ndim, t.numel(), t.dtype, t.device, t.stride()),
    "cast": lambda t: t.double() / 3,
    "cast to int": lambda t: t.to(torch.int16).sum(),
    "to like": lambda t: t.to(torch.empty(0, dtype=torch.float64)).mean(),
    "type name": lambda t: (t.type(), t.is_floating_point(), torch.is_tensor(t)),
    "added in place": lambda t: t.add_(1).sum(),
    "augmented": lambda t: (t.__iadd__(1), t.sum())[1],
}


ALL_OPERATIONS = OPERATIONS | READING | COMPUTING | CHANGING


def run_operation(operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Return the result with whole tensors, as lists where `==` does not work, and types by name."""
    return to_comparable(operation(tensor))


def to_comparable(result: Any) -> Any:
    if isinstance(result, LogicalTensor):
        result = result.whole()
    if isinstance(result, torch.Tensor):
        return str(result.dtype), result.tolist()
    if isinstance(result, numpy.ndarray):
        return str(result.dtype), result.tolist()
    return [to_comparable(part) for part in result] if isinstance(result, list | tuple) else result


def run_all_operations(mesh: Mesh) -> dict[str, Any]:
    found = {}
    for name, operation in ALL_OPERATIONS.items():
        try:
            found[name] = run_operation(operation, make_logical_tensor(mesh, whole_tensor()))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_returns_the_result_of_the_whole_tensor_on_every_rank(size):
    expected = {name: run_operation(operation, whole_tensor()) for name, operation in ALL_OPERATIONS.items()}
    for found in on_mesh(size, run_all_operations):
        wrong = {name: (found[name], value) for name, value in expected.items() if found[name] != value}
        assert not wrong


def run_and_collect_warnings(mesh: Mesh) -> dict[str, tuple[bool, list[str]]]:
    """Return for each operation whether its result is logical, and the warnings."""
    operations: dict[str, Callable[[torch.Tensor], Any]] = {
        "shape": lambda t: t.shape,
        "len": len,
        "to": lambda t: t.to("cpu", torch.float64),
        "same": lambda t: t.to("cpu"),
        "half": lambda t: t.half(),
        "clone": lambda t: t.clone(),
        "contiguous": lambda t: t.contiguous(),
        "add_": lambda t: t.add_(1),
        "mean": lambda t: t.mean(),
        "twice": lambda t: (t.mean(), t.std(), t.double().sum())[0],
    }
    found = {}
    for name, operation in operations.items():
        warnings: list[str] = []
        result = operation(make_logical_tensor(mesh, whole_tensor(), warnings))
        found[name] = (isinstance(result, LogicalTensor), warnings)
    return found


def test_casts_stay_logical_and_the_first_gather_warns_with_its_line():
    for found in on_mesh(2, run_and_collect_warnings):
        for name in ("to", "same", "half", "clone", "contiguous"):
            assert found[name] == (True, []), name
        assert found["shape"] == found["len"] == (False, [])
        for name, text in [
            ("mean", "torch.Tensor.mean"),
            ("twice", "torch.Tensor.mean"),
            ("add_", "Tensor.add_"),
        ]:
            assert len(found[name][1]) == 1
            assert text in found[name][1][0]
            assert found[name][1][0].startswith(display_name(__file__))
        assert found["add_"][0]


def change_then_read_local(mesh: Mesh) -> list[bool]:
    """Return whether this rank's rows follow each way of changing the whole in place."""
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t.mul_(2),
        lambda t: t.__setitem__(slice(5, 7), 0.0),
        lambda t: t[:, 0].fill_(9),
        lambda t: t.numpy().__setitem__((3, 3), 77.0),
        lambda t: torch.neg(t, out=t),
        lambda t: F.relu_(t),
    ]
    found = []
    for change in changes:
        tensor = make_logical_tensor(mesh, whole_tensor())
        change(tensor)
        plain = whole_tensor()
        change(plain)
        start = tensor.placement.start(mesh.rank)
        found.append(tensor.local.equal(plain[start : start + tensor.placement.lengths[mesh.rank]]))
    return found


def test_an_in_place_change_of_the_whole_changes_the_local_rows():
    assert on_mesh(3, change_then_read_local) == [[True] * 6] * 3


def reshape_in_place(mesh: Mesh, how: str) -> None:
    tensor = make_logical_tensor(mesh, torch.ones(4, 4))
    if how == "data":
        tensor.data = torch.zeros(4, 4)
    else:
        getattr(tensor, how)(*{"t_": (), "unsqueeze_": (0,), "resize_": (2, 2)}[how])


@pytest.mark.parametrize("how", ["t_", "unsqueeze_", "resize_", "data"])
def test_an_in_place_change_of_shape_or_storage_raises(how):
    with pytest.raises(DataError, match="changed them in place"):
        on_mesh(2, reshape_in_place, how)


TYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "complex64"]


def gather_types(mesh: Mesh) -> list[str]:
    """Return the dtypes and shapes that are gathered wrong."""
    wrong = []
    for name in TYPES:
        for shape, dim in [((7,), 0), ((5, 3), 0), ((4, 6, 2), 1), ((3, 0), 0)]:
            whole = (torch.arange(torch.Size(shape).numel()) % 3).reshape(shape).to(getattr(torch, name))
            tensor = make_logical_tensor(mesh, whole, dim=dim)
            if (
                tensor.shape != whole.shape
                or not tensor.whole().equal(whole)
                or not tensor.local.numel() <= whole.numel()
            ):
                wrong.append(f"{name} {shape}")
    return wrong


def test_every_dtype_and_dim_is_gathered():
    assert on_mesh(3, gather_types) == [[]] * 3


def check_hash_after_gather(mesh: Mesh) -> bool:
    tensor = make_logical_tensor(mesh, whole_tensor())
    known = {tensor: "here"}
    tensor.whole()
    return known[tensor] == "here" and tensor.local.shape == (4 if mesh.rank == 0 else 3, 5)


def test_gathering_keeps_the_hash_and_the_local_rows():
    assert on_mesh(2, check_hash_after_gather) == [True, True]


def sum_without_torch_function(mesh: Mesh) -> tuple[float, list[int]]:
    tensor = make_logical_tensor(mesh, whole_tensor())
    with torch._C.DisableTorchFunctionSubclass():
        return torch.sum(tensor).item(), list(tensor.shape)


def test_operations_called_from_cpp_work_on_the_whole_tensor():
    assert on_mesh(2, sum_without_torch_function) == [(whole_tensor().sum().item(), [7, 5])] * 2


def test_what_follows_from_a_whole_tensor_needs_no_other_rank():
    whole = whole_tensor()
    alone = Mesh(rank=0, size=2, device=torch.device("cpu"))  # it has no group: nothing can be gathered
    monitor = GatherMonitor([].append)
    tensor = LogicalTensor(whole[:4], placement=Shard(0, (4, 3)), mesh=alone, monitor=monitor, whole=whole)
    moved = tensor.double().cpu().clone().contiguous()
    assert isinstance(moved, LogicalTensor)
    assert moved.local.shape == (4, 5)
    assert torch.equal(moved.whole(), whole.double())
    assert moved.sum().item() == whole.sum().item()
