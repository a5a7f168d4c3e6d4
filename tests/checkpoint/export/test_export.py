"""`rankless checkpoint export`: plain safetensors files that safetensors alone reads, and nothing if it fails."""

import inspect
import json
import os
import resource
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from checkpoint.divided_tensors import divide
from checkpoint.incremental.saved_tables import layer_everything, layers_of
from checkpoint.saved_objects import SOLO, Holder, save
from support.processes import on_mesh
from torch import nn

import rankless
from rankless.checkpoint import safetensors_export
from rankless.cli import main
from rankless.cli.checkpoint import parse_size
from rankless.errors import ConfigError
from rankless.extensions.servers.tables import row_optimizers
from rankless.extensions.servers.tables.contents import STATE_COUNTS
from rankless.parameter_server import Embedding


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = Embedding(3, seed=1), Embedding(2, seed=2)
        self.head = nn.Linear(5, 1).bfloat16()
        self.tied = self.head.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0, 3))


def train(steps=3):
    """Return a model with trained tables, and its optimizers."""
    model = Recommender()
    optimizers = [
        torch.optim.Adagrad(model.users.parameters(), 0.1),
        torch.optim.SparseAdam(list(model.items.parameters()), 0.1),
    ]
    for step in range(steps):
        ids = torch.arange(40 + 5 * step) * 1_000_000_007 - 5
        (model.users(ids).square().sum() + model.items(ids).sin().sum()).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return model, optimizers


def export(*arguments):
    return main(["checkpoint", "export", *map(str, arguments)])


def require_tables(found, model):
    for name in ("users", "items"):
        rows = getattr(model, name).list_rows()
        assert torch.equal(found[f"model.{name}.ids"], rows["ids"])
        assert torch.equal(found[f"model.{name}.rows"], rows["rows"])
        assert f"model.{name}.weight" not in found


def test_safetensors_alone_reads_modules_and_tables(tmp_path, capsys):
    model, optimizers = train()
    save(tmp_path / "c", {"model": model, "first": optimizers[0], "loader": Holder({"t": torch.ones(2)})})
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors") == 0
    found = safetensors.torch.load_file(tmp_path / "e.safetensors")
    require_tables(found, model)
    dense = {"tied", "head.bias", "count", "nothing"}  # a tied tensor is there under its first name
    assert set(found) == {f"model.{name}" for name in (*dense, "users.ids", "users.rows", "items.ids", "items.rows")}
    for name in dense:
        wanted = model.state_dict()[name]
        assert found[f"model.{name}"].dtype == wanted.dtype
        assert torch.equal(found[f"model.{name}"], wanted)
    shown = capsys.readouterr().out
    assert f"8 tensors, {sum(each.nbytes for each in found.values()):,} bytes, in {tmp_path}/e.safetensors" in shown
    assert "not exported: first, loader" in shown


def test_states_of_optimizers_are_exported_on_request(tmp_path):
    model, optimizers = train()
    dense = torch.optim.AdamW(model.head.parameters())
    model.head(torch.ones(1, 5).bfloat16()).sum().backward()
    dense.step()
    save(tmp_path / "c", {"model": model, "dense": dense, "first": optimizers[0]})
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors", "--optimizer-states") == 0
    found = safetensors.torch.load_file(tmp_path / "e.safetensors")
    require_tables(found, model)
    for name, dim in (("users", 3), ("items", 2)):
        stored = getattr(model, name).get_extra_state()["rows"]
        assert torch.equal(found[f"model.{name}.states"], stored[:, dim:])
    assert torch.equal(found["dense.state.0.exp_avg"], dense.state[model.head.weight]["exp_avg"])


@pytest.mark.parametrize("limit", [1, 100, 700, 1500])
def test_a_large_export_is_in_files_with_an_index(tmp_path, limit):
    model, _ = train()
    save(tmp_path / "c", {"model": model})
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors", "--max-file-size", limit) == 0
    index = json.loads((tmp_path / "e.safetensors.index.json").read_text())
    names = sorted(name for name in os.listdir(tmp_path) if name.startswith("e-"))
    assert names == [f"e-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
    assert len(names) > 1
    found = {}
    for name in names:
        part = safetensors.torch.load_file(tmp_path / name)
        assert {index["weight_map"][each] for each in part} == {name}
        assert len(part) == 1 or sum(each.nbytes for each in part.values()) <= limit
        found |= part
    assert found.keys() == index["weight_map"].keys()
    assert sum(each.nbytes for each in found.values()) == index["metadata"]["total_size"]
    require_tables(found, model)


def test_rows_of_several_files_are_exported_as_one_table(tmp_path, monkeypatch):
    layer_everything(monkeypatch)
    monkeypatch.setattr(safetensors_export, "PART_BYTES", 100)
    for steps in (1, 2, 3):
        torch.manual_seed(0)
        model, _ = train(steps)
        save(tmp_path / "c", {"model": model})
    model.users.get_extra_state()
    assert layers_of(tmp_path / "c", "model.users._extra_state.ids")
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors") == 0
    require_tables(safetensors.torch.load_file(tmp_path / "e.safetensors"), model)


def save_divided(mesh, path):
    tensor = torch.arange(60.0).reshape(12, 5)
    save(path, {"model": Holder({"t": divide(mesh, tensor)})}, mesh=mesh, layout="sharded")


@pytest.mark.slow
def test_tensors_in_pieces_are_exported_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_export, "PART_BYTES", 60)
    on_mesh(2, save_divided, tmp_path / "c")
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors", "--objects", "model") == 0
    found = safetensors.torch.load_file(tmp_path / "e.safetensors")
    assert torch.equal(found["model.t"], torch.arange(60.0).reshape(12, 5))


SMALL_MEMORY = """
import resource, sys
import rankless.checkpoint.safetensors_export
from rankless.cli import main
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData:")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[1]),) * 2)
sys.exit(main(["checkpoint", "export", *sys.argv[2:]]))
"""


def run_limited(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    model = nn.ModuleDict({"dense": nn.Linear(4096, 8192), "table": Embedding(64, seed=1)})
    optimizer = torch.optim.Adagrad(model["table"].parameters(), 0.1)
    model["table"](torch.arange(300_000)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", {"model": model})
    # The files are mapped, which counts as memory although it takes none. Beyond that, no tensor would fit whole.
    mapped = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    limit = 80 << 20
    assert min(model["dense"].weight.nbytes, model["table"].get_extra_state()["rows"].nbytes) > limit
    folders = (tmp_path / "c", "--to", tmp_path / "e.safetensors")
    done = run_limited(SMALL_MEMORY, mapped + limit, *folders, "--optimizer-states")
    assert done.returncode == 0, done.stderr[-2000:]
    found = safetensors.torch.load_file(tmp_path / "e.safetensors")
    assert torch.equal(found["model.table.rows"], model["table"].list_rows()["rows"])
    assert torch.equal(found["model.dense.weight"], model["dense"].weight)


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint, c, a series, run, and a file, taken.safetensors."""
    torch.manual_seed(0)
    save(tmp_path / "c", {"model": nn.Linear(3, 2), "loader": Holder({"position": 3})})
    save(tmp_path / "plain", {"loader": Holder({"position": 3})})
    rankless.checkpoints(tmp_path / "run").save(7, model=nn.Linear(3, 2))
    (tmp_path / "other").mkdir()
    (tmp_path / "taken.safetensors").write_text("mine")
    (tmp_path / "part-00002-of-00002.safetensors").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to("nowhere.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("absent --to e.safetensors", "nothing there"),
        ("other --to e.safetensors", "a folder without manifest.json"),
        ("taken.safetensors --to e.safetensors", "a file"),
        ("run --to e.safetensors", "run/step-7"),
        ("plain --to e.safetensors", "the objects are loader"),
        ("c --to e.bin", "end the file's name in .safetensors"),
        ("c --to .safetensors", "end the file's name in .safetensors"),
        ("c --to absent/e.safetensors", "create the folder first"),
        ("c --to taken.safetensors", "remove it, or choose another name"),
        ("c --to part.safetensors --max-file-size 24", "part-00002-of-00002.safetensors"),
        ("c --to c/e.safetensors", "outside of the checkpoint"),
        ("c --to e.safetensors --objects model,absent", "names of saved objects: model, loader"),
        ("c --to e.safetensors --objects loader", "none in loader"),
        ("c --to e.safetensors --objects model,", "separated by commas"),
        ("c --to e.safetensors --objects model,model", "different names"),
        ("c --to e.safetensors --max-file-size 0", "a number of bytes"),
        ("c --to e.safetensors --max-file-size 5XB", "a number of bytes"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_no_file(saved, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(saved)
    before = sorted(os.listdir(saved)), sorted(os.listdir(saved / "c"))
    assert export(*arguments.split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert all(f"{word}:" in shown for word in ("expected", "found", "fix"))
    assert (sorted(os.listdir(saved)), sorted(os.listdir(saved / "c"))) == before
    assert (saved / "taken.safetensors").read_text() == "mine"


def test_a_damaged_checkpoint_is_not_exported(saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    file = saved / "c" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert export("c", "--to", "e.safetensors") == 2
    assert "another checksum" in capsys.readouterr().err
    assert not [name for name in os.listdir(saved) if "e.safetensors" in name]


FULL_DISK = """
import resource, sys
from rankless.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(["checkpoint", "export", *sys.argv[2:]]))
"""


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--max-file-size", "10")])
def test_a_disk_that_is_full_leaves_no_file(saved, options):
    limit = 150 if options else 60
    done = run_limited(FULL_DISK, limit, "c", "--to", "e.safetensors", *options, cwd=saved)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "File too large" in done.stderr
    assert "fix:      free space there" in done.stderr
    assert not [name for name in os.listdir(saved) if name.startswith((".e", "e"))]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_an_export_that_needs_more_room_than_there_is_does_not_begin(saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    usage = safetensors_export.shutil.disk_usage(saved)
    monkeypatch.setattr(safetensors_export.shutil, "disk_usage", lambda _: usage._replace(free=31))
    assert export("c", "--to", "e.safetensors") == 2
    assert "expected: 32 free bytes" in capsys.readouterr().err


def test_every_optimizer_of_tables_has_its_number_of_states():
    classes = [
        each
        for _, each in inspect.getmembers(row_optimizers, inspect.isclass)
        if isinstance(vars(each).get("name"), str)
    ]
    assert len(classes) >= 6
    assert all(STATE_COUNTS[each.name] == each.states for each in classes)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2GiB", 2 << 30), ("9", 9)])
def test_sizes_have_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "nan", "1 0"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError):
        parse_size(text)


def test_an_export_of_a_plain_checkpoint_is_what_was_saved(tmp_path):
    state = {"whole": torch.arange(6).reshape(2, 3), "number": torch.tensor(2.5), "list": [torch.ones(1)]}
    save(tmp_path / "c", {"thing": Holder(state)}, mesh=SOLO)
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors", "--objects", "thing") == 0
    found = safetensors.torch.load_file(tmp_path / "e.safetensors")
    assert set(found) == {"thing.whole", "thing.number", "thing.list.0"}
    assert torch.equal(found["thing.whole"], state["whole"])
    assert found["thing.number"] == 2.5


class NamedLikeATable(Embedding):
    """A table with tensors of its own that have the names of an export."""

    def __init__(self):
        super().__init__(2, seed=1)
        self.register_buffer("ids", torch.arange(4))
        self.rows = nn.Parameter(torch.ones(3))
        self.register_buffer("sparse", torch.eye(3).to_sparse())


def test_no_tensor_hides_another_one(tmp_path):
    model = nn.ModuleDict({"table": NamedLikeATable(), "again": nn.Linear(1, 1)})
    model["tied"] = model["again"]
    optimizer = torch.optim.Adagrad([model["table"].weight], 0.1)
    model["table"](torch.tensor([5, 9])).sum().backward()
    optimizer.step()
    save(tmp_path / "c", {"model": model})
    assert export(tmp_path / "c", "--to", tmp_path / "e.safetensors") == 0
    found = safetensors.torch.load_file(tmp_path / "e.safetensors")
    assert torch.equal(found["model.table.ids"], torch.arange(4))
    assert torch.equal(found["model.table.rows"], torch.ones(3))
    assert torch.equal(found["model.table.sparse.indices"], torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert torch.equal(found["model.table._extra_state.ids.ids"], torch.tensor([5, 9]))
    assert torch.equal(found["model.table._extra_state.rows.rows"], model["table"].list_rows()["rows"])
    assert len(found) == 8
