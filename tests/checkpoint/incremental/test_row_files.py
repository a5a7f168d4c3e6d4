"""A save writes the rows of a table that have changed, and any checkpoint gives the whole table, bit by bit."""

import hashlib
import json
import math
import os
import random
import shutil
import struct

import msgspec
import pytest
import safetensors.torch
import torch
from checkpoint.incremental.saved_tables import TableState, layer_everything, layers_of, require_loads
from checkpoint.saved_objects import SOLO, Holder, save

from rankless.checkpoint import incremental_row_files, load
from rankless.checkpoint.manifest import Manifest, encode_manifest
from rankless.errors import CheckpointError


@pytest.fixture(autouse=True)
def _layered(monkeypatch):
    layer_everything(monkeypatch)


def drawn_row(drawn):
    return torch.tensor([drawn.uniform(-1, 1) for _ in range(3)], dtype=torch.float64)


def make_rows(count, seed=0):
    drawn = random.Random(seed)
    return {drawn.randint(-(2**63), 2**63 - 1): drawn_row(drawn) for _ in range(count)}


def change_rows(rows, drawn):
    """Return rows of which some are other, new, or gone: few, many, or all."""
    share = drawn.choice([0, 0.01, 0.1, 0.6, 1])
    changed = {each: row for each, row in rows.items() if drawn.random() > drawn.choice([0, share])}
    for each in list(changed):
        if drawn.random() < share:
            changed[each] = drawn_row(drawn)
    for _ in range(drawn.choice([0, 1, 40])):
        changed[drawn.randint(-(2**63), 2**63 - 1)] = drawn_row(drawn)
    return changed


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_changes_are_read_back_bit_by_bit(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(incremental_row_files, "MOST_LAYERS", 4)
    drawn = random.Random(3)
    rows, numbers = make_rows(200), set()
    for _ in range(60):
        rows = change_rows(rows, drawn)
        waiting = {drawn.randint(-9, 9): drawn.randint(1, 99) for _ in range(drawn.choice([0, 5]))}
        table = TableState(rows, dtype=dtype, waiting=waiting)
        save(tmp_path / "c", {"table": table})
        require_loads(tmp_path / "c", table.state_dict(), SOLO)
        numbers.add(len(layers_of(tmp_path / "c")))
    assert numbers == {1, 2, 3, 4}


def test_a_second_save_writes_the_changed_rows_alone(tmp_path):
    rows = make_rows(2_000)
    save(tmp_path / "a", {"table": TableState(rows)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (first,) = layers_of(tmp_path / "a")
    chosen = sorted(rows)[700:710]
    changed = rows | {each: rows[each] + 1 for each in chosen}
    save(tmp_path / "b", {"table": TableState(changed)})
    assert layers_of(tmp_path / "b")[0] == first
    with_changes = len(layers_of(tmp_path / "b"))
    assert with_changes == 2
    size = (tmp_path / "a" / first).stat().st_size
    assert (tmp_path / "b" / layers_of(tmp_path / "b")[1]).stat().st_size < 0.05 * size
    save(tmp_path / "b", {"table": TableState(changed)})
    assert len(layers_of(tmp_path / "b")) == with_changes  # nothing has changed: no file


def test_bits_decide_and_not_numbers(tmp_path):
    odd = [0.0, -0.0, math.nan, struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0], math.inf]
    rows = make_rows(50)
    (chosen, *_) = rows
    for value in odd:
        table = TableState(rows | {chosen: torch.full((3,), value, dtype=torch.float64)}, dtype=torch.float64)
        save(tmp_path / "c", {"table": table})
        require_loads(tmp_path / "c", table.state_dict(), SOLO)
        save(tmp_path / "c", {"table": table})
        require_loads(tmp_path / "c", table.state_dict(), SOLO)


@pytest.mark.parametrize(
    "other",
    [
        TableState(make_rows(100), dtype=torch.float64),
        TableState({each: torch.ones(5) for each in make_rows(100)}),
        TableState({each: torch.ones(3, 2) for each in make_rows(100)}),
        TableState({}),
        TableState(make_rows(1)),
        TableState(make_rows(100, seed=1)),
    ],
    ids=["dtype", "width", "dims", "empty", "one", "other ids"],
)
def test_rows_of_another_form_are_written_whole(tmp_path, other):
    table = TableState(make_rows(100))
    for each in (table, other, table, other, other):
        save(tmp_path / "c", {"table": each})
        require_loads(tmp_path / "c", each.state_dict(), SOLO)


@pytest.mark.parametrize("breaks", ["links", "checksum", "file", "manifest"])
def test_a_checkpoint_before_that_is_of_no_use_costs_a_whole_save(tmp_path, breaks, monkeypatch):
    table = TableState(make_rows(500))
    save(tmp_path / "c", {"table": table})
    (first,) = layers_of(tmp_path / "c")
    file = tmp_path / "c" / first

    def refuse(*_arguments, **_options):
        raise PermissionError(1, "Operation not permitted")

    if breaks == "links":
        monkeypatch.setattr(os, "link", refuse)
    elif breaks == "checksum":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="another checksum"):
            require_loads(tmp_path / "c", table.state_dict(), SOLO)
    elif breaks == "file":
        file.unlink()
    else:
        (tmp_path / "c" / "manifest.json").write_text("{}")
    save(tmp_path / "c", {"table": table})
    assert first not in layers_of(tmp_path / "c")
    require_loads(tmp_path / "c", table.state_dict(), SOLO)


SAME = torch.arange(4)
LOOKALIKES = {
    "ids that fall": {"ids": torch.tensor([3, 1, 2]), "rows": torch.ones(3, 2), "used_steps": torch.ones(3)},
    "an id twice": {"ids": torch.tensor([1, 1, 2]), "rows": torch.ones(3, 2), "used_steps": torch.ones(3)},
    "too few ids": {"ids": torch.tensor([1, 2]), "rows": torch.ones(3, 2), "used_steps": torch.ones(3)},
    "numbers": {"ids": torch.tensor(1), "rows": torch.tensor(2.0), "used_steps": torch.tensor(3)},
    "float ids": {"ids": torch.tensor([1.0, 2.0]), "rows": torch.ones(2), "used_steps": torch.ones(2)},
    "empty rows": {
        "ids": torch.tensor([1, 2]),
        "rows": torch.ones(2, 0),
        "used_steps": torch.ones(2, 2, dtype=torch.bool),
    },
    "complex rows": {
        "ids": torch.tensor([1, 2]),
        "rows": torch.ones(2, 2, dtype=torch.complex64),
        "used_steps": torch.ones(2),
    },
    "columns of ids": {"ids": torch.tensor([[1], [2]]), "rows": torch.ones(2, 2), "used_steps": torch.ones(2)},
    "one tensor": {"ids": SAME, "rows": SAME, "used_steps": SAME, "copy": SAME},
}


@pytest.mark.parametrize("form", LOOKALIKES.values(), ids=LOOKALIKES)
def test_states_that_only_look_like_a_table_are_kept(tmp_path, form):
    for _ in range(2):
        save(tmp_path / "c", {"thing": Holder(form), "again": Holder([form, {"x": form}])})
        thing, again = Holder(), Holder()
        load(tmp_path / "c", {"thing": thing, "again": again}, mesh=SOLO)
        for found in (thing.state, again.state[0], again.state[1]["x"]):
            assert found.keys() == form.keys()
            assert all(torch.equal(found[key], value) for key, value in form.items())


def edit_manifest(folder, edit):
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    manifest["sha256"] = ""
    decoded = msgspec.convert(manifest, Manifest)
    (folder / "manifest.json").write_bytes(encode_manifest(decoded))


ABSENT = f"rows-{'0' * 32}.safetensors"
EDITS = {
    "no layer": lambda manifest: manifest["tables"][0].update(layers=[]),
    "a layer twice": lambda manifest: manifest["tables"][0]["layers"].append(manifest["tables"][0]["layers"][0]),
    "layers in another order": lambda manifest: manifest["tables"][0]["layers"].reverse(),
    "a layer of another table": lambda manifest: manifest["tables"][1].update(layers=manifest["tables"][0]["layers"]),
    "a layer that is missing": lambda manifest: manifest["tables"][0]["layers"].append(ABSENT),
    "a layer too few": lambda manifest: manifest["tables"][0]["layers"].pop(),
    "no table": lambda manifest: manifest["tables"].clear(),
    "a table twice": lambda manifest: manifest["tables"].append(manifest["tables"][0]),
    "a column too few": lambda manifest: manifest["tables"][0]["columns"].pop(),
    "ids of another column": lambda manifest: manifest["tables"][0].update(
        ids="table.used_steps", columns=["table.rows", "table.ids"]
    ),
    "another tensor file": lambda manifest: manifest["tables"][0].update(layers=["tensors.safetensors"]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_manifest_that_does_not_fit_its_files_is_refused(tmp_path, edit):
    rows = make_rows(200)
    table = TableState(rows, waiting=dict.fromkeys(range(50), 5))
    save(tmp_path / "c", {"table": table})
    (chosen, *_) = rows
    fewer = {each: row for each, row in rows.items() if each != chosen} | {5: torch.ones(3)}
    save(tmp_path / "c", {"table": TableState(fewer, waiting=table.waiting)})
    assert len(layers_of(tmp_path / "c")) == 2
    edit_manifest(tmp_path / "c", edit)
    with pytest.raises(CheckpointError):
        require_loads(tmp_path / "c", table.state_dict(), SOLO)


def test_a_table_that_has_grown_is_written_as_rows_from_then_on(tmp_path, monkeypatch):
    table = TableState(make_rows(100))
    monkeypatch.setattr(incremental_row_files, "LEAST_BYTES", 1 << 20)
    save(tmp_path / "c", {"table": table})
    assert layers_of(tmp_path / "c") == []
    layer_everything(monkeypatch)
    save(tmp_path / "c", {"table": table})
    assert len(layers_of(tmp_path / "c")) == 1
    require_loads(tmp_path / "c", table.state_dict(), SOLO)


def turned(tensors):
    return {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}


def with_one(tensors, name, change):
    return tensors | {name: change(tensors[name]).contiguous()}


FORGERIES = {
    "ids that fall": turned,
    "an id twice": lambda tensors: with_one(tensors, "table.ids", lambda ids: ids.clone().fill_(3)),
    "other ids": lambda tensors: with_one(tensors, "table.ids", lambda ids: ids + 1),
    "ids of int32": lambda tensors: with_one(tensors, "table.ids", lambda ids: torch.arange(len(ids)).int()),
    "a column that is short": lambda tensors: with_one(tensors, "table.rows", lambda rows: rows[1:]),
    "a column that is wide": lambda tensors: with_one(tensors, "table.rows", lambda rows: torch.cat([rows, rows], 1)),
    "a column of float64": lambda tensors: with_one(tensors, "table.rows", lambda rows: rows.double()),
    "a column without rows": lambda tensors: with_one(tensors, "table.rows", lambda rows: rows[0, 0]),
    "an unknown id removed": lambda tensors: with_one(tensors, "table.ids#removed", lambda ids: ids - 1),
    "two columns of removed ids": lambda tensors: with_one(tensors, "table.ids#removed", lambda ids: ids.unsqueeze(0)),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_files_of_rows_that_do_not_belong_together_are_refused(tmp_path, forge):
    rows = make_rows(200)
    save(tmp_path / "c", {"table": TableState(rows)})
    fewer = dict(list(rows.items())[5:])
    for each in list(fewer)[:10]:
        fewer[each] = fewer[each] + 1
    table = TableState(fewer)
    save(tmp_path / "c", {"table": table})
    file = tmp_path / "c" / layers_of(tmp_path / "c")[1]
    forged = forge(safetensors.torch.load_file(file))
    safetensors.torch.save_file(forged, file)

    def seal(manifest):
        (entry,) = [each for each in manifest["files"] if each["name"] == file.name]
        entry.update(size_bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())

    edit_manifest(tmp_path / "c", seal)
    with pytest.raises(CheckpointError):
        require_loads(tmp_path / "c", table.state_dict(), SOLO)
    save(tmp_path / "c", {"table": table})  # what cannot be read is written anew
    require_loads(tmp_path / "c", table.state_dict(), SOLO)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_manifests_of_earlier_versions_without_tables_are_read(tmp_path, monkeypatch, version):
    monkeypatch.setattr(incremental_row_files, "LEAST_BYTES", 1 << 20)
    table = TableState(make_rows(100))
    save(tmp_path / "c", {"table": table})
    file = tmp_path / "c" / "manifest.json"
    text = file.read_text().replace(' "tables": [],\n', "").replace('"version": 5', f'"version": {version}')
    sealed = json.loads(text)["sha256"]
    assert "tables" not in json.loads(text)
    unsealed = text.replace(f'"sha256": "{sealed}"', '"sha256": ""')
    file.write_text(text.replace(sealed, hashlib.sha256(unsealed.encode()).hexdigest()))
    require_loads(tmp_path / "c", table.state_dict(), SOLO)
    layer_everything(monkeypatch)
    save(tmp_path / "c", {"table": table})
    require_loads(tmp_path / "c", table.state_dict(), SOLO)
