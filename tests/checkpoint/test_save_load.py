"""What is saved is what is loaded: values, types, tied tensors, random number generators."""

import copy
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint.saved_objects import SOLO, Holder, save
from support.processes import on_mesh
from torch import nn

from rankless.checkpoint import load
from rankless.errors import CheckpointError


def model_and_optimizer(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.5}], lr=0.1
    )
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])


def train(model, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 1, 4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_continues_bit_for_bit_after_a_restart(tmp_path):
    first = model_and_optimizer(0)
    train(*first, 2)
    save(tmp_path / "c", dict(zip("mos", first, strict=True)))
    expected = train(*first, 4)
    second = model_and_optimizer(1)
    load(tmp_path / "c", dict(zip("mos", second, strict=True)), mesh=SOLO)
    assert train(*second, 4) == expected
    assert second[2].milestones == first[2].milestones


def test_every_writable_value_is_restored_with_its_type(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3)
    state = {
        "numbers": [1, 2**100, -3, 1.0, 0.1, float("inf"), float("-inf"), True, None],
        4: ("text ü", b"\x00\xff", ()),
        "empty": {},
        "numpy": [np.float32(0.1), np.int64(7), np.bool_(True)],
        "array": np.arange(3, dtype=np.uint32),
        "foreign order": np.arange(3, dtype=">i4"),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "bf16": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "none at all": torch.empty(0, 3),
        "turned": tensor.t(),
        "part": tensor[:, 1],
        "spread": torch.ones(1).expand(5),
        "whole": tensor,
    }
    save(tmp_path / "c", {"thing": Holder(state)})
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    assert back.state.keys() == state.keys()
    for key, value in state.items():
        found = back.state[key]
        assert type(found) is type(value)
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype
            assert torch.equal(found, value)
        elif isinstance(value, np.ndarray):
            assert found.dtype == value.dtype
            assert found.tolist() == value.tolist()
        else:
            assert found == value
            if isinstance(value, list | tuple):
                assert [type(item) for item in found] == [type(item) for item in value]


def test_nan_is_restored_as_nan(tmp_path):
    save(tmp_path / "c", {"thing": Holder({"value": float("nan")})})
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    assert back.state["value"] != back.state["value"]


def test_tied_tensors_are_saved_once_and_restored_tied(tmp_path):
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    save(tmp_path / "c", {"model": model, "list": Holder([model[0].weight, model[0].weight])})
    tensors = safetensors.torch.load_file(tmp_path / "c" / "tensors.safetensors")
    assert [name for name in tensors if not name.startswith("random.")] == ["model.0.weight"]
    back = Holder()
    load(tmp_path / "c", {"list": back}, mesh=SOLO)
    assert back.state[0] is back.state[1]


def test_tensors_are_found_by_safetensors_alone_under_dotted_names(tmp_path):
    model, optimizer, scheduler = model_and_optimizer(0)
    train(model, optimizer, scheduler, 1)
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    tensors = safetensors.torch.load_file(tmp_path / "c" / "tensors.safetensors")
    assert torch.equal(tensors["model.0.weight"], model[0].weight)
    assert torch.equal(tensors["optimizer.state.0.exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_two_paths_with_one_name_do_not_mix(tmp_path):
    thing = Holder({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    save(tmp_path / "c", {"thing": thing})
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    assert back.state["a.b"] == 0
    assert back.state["a"]["b"] == 1


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)


def test_random_numbers_continue_where_they_were(tmp_path):
    random.gauss(0, 1)
    save(tmp_path / "c", {})
    expected = draws()
    assert draws() != expected
    load(tmp_path / "c", {}, mesh=SOLO)
    assert draws() == expected


def test_with_random_false_the_generators_stay(tmp_path):
    torch.manual_seed(1)
    save(tmp_path / "c", {})
    torch.manual_seed(2)
    expected = torch.rand(3).tolist()
    torch.manual_seed(2)
    load(tmp_path / "c", {}, mesh=SOLO, random=False)
    assert torch.rand(3).tolist() == expected


def test_a_loaded_checkpoint_does_not_follow_the_file(tmp_path):
    save(tmp_path / "c", {"thing": Holder({"t": torch.ones(100)})})
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    file = tmp_path / "c" / "tensors.safetensors"
    with file.open("rb+") as stream:
        stream.write(b"\0" * file.stat().st_size)
    assert torch.equal(back.state["t"], torch.ones(100))


@pytest.mark.parametrize(
    ("state", "where", "what"),
    [
        ({"a": [1, {2}]}, "thing.a.1", "set"),
        ({"f": lambda: 0}, "thing.f", "function"),
        ({(1, 2): 0}, "thing", "(1, 2)"),
        ({True: 0}, "thing", "bool"),
        ({"n": np.array(["x"])}, "thing.n", "dtype"),
        ({"n": np.datetime64("2026-01-01")}, "thing.n", "datetime64"),
        ({"t": torch.eye(2).to_mkldnn()}, "thing.t", "mkldnn"),
        ({"t": torch.empty(2, dtype=torch.bits8)}, "thing.t", "bits8"),
        ({"t": torch.zeros(2, device="meta")}, "thing.t", "meta"),
        ({"c": 1j}, "thing.c", "complex"),
    ],
)
def test_a_value_that_cannot_be_written_is_named_by_its_path(tmp_path, state, where, what):
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "c", {"thing": Holder(state)})
    assert f"{where} to be made of" in str(caught.value)
    assert what in str(caught.value)
    assert not (tmp_path / "c").exists()


def sparse_training(seed):
    torch.manual_seed(seed)
    model = nn.Embedding(10, 3, sparse=True)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train_sparsely(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(torch.tensor(batch)).square().sum().backward()
        optimizer.step()
    return model.weight.detach().clone()


def test_momentum_of_sparse_gradients_continues_bit_for_bit(tmp_path):
    model, optimizer = sparse_training(0)
    train_sparsely(model, optimizer, [[1, 2, 2], [3, 1], [9]])
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    wanted = train_sparsely(model, optimizer, [[1], [4, 4]])
    model, optimizer = sparse_training(1)
    load(tmp_path / "c", {"model": model, "optimizer": optimizer}, mesh=SOLO)
    assert torch.equal(train_sparsely(model, optimizer, [[1], [4, 4]]), wanted)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.sparse_coo_tensor(
            torch.tensor([[0, 0]]), torch.ones(2, 2, dtype=torch.bfloat16), (4, 2), check_invariants=True
        ),
        torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (2, 0), check_invariants=True),
    ],
    ids=["coalesced", "hybrid", "empty"],
)
def test_sparse_tensors_are_kept_as_they_are(tmp_path, tensor):
    save(tmp_path / "c", {"thing": Holder({"t": tensor, "again": [tensor]})})
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    for found in (back.state["t"], back.state["again"][0]):
        assert (found.layout, found.shape, found.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
        assert found.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(found._indices(), tensor._indices())
        assert torch.equal(found._values(), tensor._values())


def test_extra_data_is_restored_or_refused_by_its_path(tmp_path):
    extra = {"epoch": 1, "history": [0.5, float("nan")], "best": torch.ones(2), "seen": np.arange(2)}
    save(tmp_path / "c", {"thing": Holder({"t": extra["best"]})}, extra=extra)
    back = load(tmp_path / "c", {}, mesh=SOLO).extra
    assert (back["epoch"], back["history"][0], back["best"].tolist(), back["seen"].tolist()) == (1, 0.5, [1, 1], [0, 1])
    endless = []
    endless.append(endless)
    for wrong, what in ((endless, "nested more than"), ({"f": print}, r"extra\.f to be made of")):
        with pytest.raises(CheckpointError, match=what):
            save(tmp_path / "d", {}, extra=wrong)
    assert load(tmp_path / "c", {}, mesh=SOLO, random=False).left_out == ""


def test_objects_that_cannot_be_saved_or_loaded_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="rate to have state_dict"):
        save(tmp_path / "c", {"rate": 0.1})
    with pytest.raises(CheckpointError, match="another name"):
        save(tmp_path / "c", {"random": Holder({})})
    save(tmp_path / "c", {"thing": Holder({})})
    with pytest.raises(CheckpointError, match=r"holds: thing\nfound:    other"):
        load(tmp_path / "c", {"other": Holder()}, mesh=SOLO)
    with pytest.raises(CheckpointError, match="holds: thing"):
        load(tmp_path / "c", {"random": Holder()}, mesh=SOLO)
    with pytest.raises(CheckpointError, match="thing to have load_state_dict"):
        load(tmp_path / "c", {"thing": 3}, mesh=SOLO)


def save_own_rank(mesh, path, layout, seeds):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(seeds[mesh.rank])
    save(
        path, {"thing": Holder({"rank": mesh.rank, "t": torch.full((2,), float(mesh.rank))})}, mesh=mesh, layout=layout
    )
    return path.exists(), torch.rand(1).item()


def load_state(mesh, path):
    back = Holder()
    load(path, {"thing": back}, mesh=mesh)
    return back.state["rank"], back.state["t"].tolist(), torch.rand(1).item()


def error_of(mesh, path, objects):
    try:
        save(path, objects if mesh.rank == 0 else {}, mesh=mesh)
    except CheckpointError as error:
        return str(error)
    return None


def load_error(mesh, paths):
    torch.manual_seed(7)
    try:
        load(paths[mesh.rank], {}, mesh=mesh)
    except CheckpointError as error:
        untouched = torch.initial_seed() == 7 and torch.rand(1).item()
        return str(error), untouched
    return None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_0_writes_and_every_rank_gets_its_state(tmp_path, ranks):
    saved = on_mesh(ranks, save_own_rank, tmp_path / "c", "whole", [5] * ranks)
    assert all(there for there, _ in saved)
    expected = (0, [0.0, 0.0], saved[0][1])
    assert on_mesh(ranks, load_state, tmp_path / "c") == [expected] * ranks
    assert load_state(SOLO, tmp_path / "c") == expected
    names = safetensors.torch.load_file(tmp_path / "c" / "tensors.safetensors").keys()
    assert {name.split(".")[1] for name in names if name.startswith("random.")} == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_different_generators_are_restored_on_each_rank(tmp_path, layout):
    draws = [draw for _, draw in on_mesh(2, save_own_rank, tmp_path / "c", layout, [1, 2])]
    assert draws[0] != draws[1]
    assert [state[2] for state in on_mesh(2, load_state, tmp_path / "c")] == draws
    # A rank that was not there takes rank 0's.
    assert [state[2] for state in on_mesh(3, load_state, tmp_path / "c")] == [*draws, draws[0]]
    assert load_state(SOLO, tmp_path / "c")[2] == draws[0]


@pytest.mark.slow
def test_a_failure_of_rank_0_raises_on_all_ranks(tmp_path):
    errors = on_mesh(2, error_of, tmp_path / "c", {"rate": 0.1})
    assert "rate to have state_dict" in errors[0]
    assert "rank 0 failed" in errors[1]
    assert "rate to have state_dict" in errors[1]


@pytest.mark.slow
def test_ranks_that_read_different_checkpoints_or_none_restore_nothing(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, {"thing": Holder({"name": name})})
    torch.manual_seed(7)
    expected = torch.rand(1).item()
    for answer in on_mesh(2, load_error, [tmp_path / "a", tmp_path / "b"]):
        assert "consistently" in answer[0]
        assert answer[1] == expected
    answers = on_mesh(2, load_error, [tmp_path / "a", tmp_path / "missing"])
    assert "rank 1 failed" in answers[0][0]
    assert "nothing there" in answers[1][0]


def test_saving_changes_nothing_that_is_saved(tmp_path):
    parts = model_and_optimizer(0)
    train(*parts, 1)
    before = copy.deepcopy([part.state_dict() for part in parts])
    save(tmp_path / "c", dict(zip("mos", parts, strict=True)))
    for part, old in zip(parts, before, strict=True):
        assert str(part.state_dict()) == str(old)
