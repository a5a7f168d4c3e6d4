"""Objects whose state is that of a table, and what a checkpoint of them has on disk."""

import json
from pathlib import Path

import torch

from rankless.checkpoint import incremental_row_files, load


class TableState:
    """Rows by ids, as a table's state has them. `rows` is a dict from an id to a list of numbers."""

    def __init__(self, rows=None, dtype=torch.float32, waiting=None):
        self.dtype = dtype
        self.rows = rows or {}
        self.waiting = waiting or {}
        self.loaded = None

    def state_dict(self):
        ids, waiting = sorted(self.rows), sorted(self.waiting)
        return {
            "step": len(ids),
            "ids": torch.tensor(ids, dtype=torch.int64),
            "rows": torch.stack([torch.as_tensor(self.rows[each]).to(self.dtype) for each in ids])
            if ids
            else torch.empty(0, 3, dtype=self.dtype),
            "used_steps": torch.tensor([each % 7 for each in ids], dtype=torch.int64),
            "waiting_ids": torch.tensor(waiting, dtype=torch.int64),
            "waiting_occurrences": torch.tensor([self.waiting[each] for each in waiting], dtype=torch.int64),
            "waiting_steps": torch.tensor([self.waiting[each] + 1 for each in waiting], dtype=torch.int64),
        }

    def load_state_dict(self, state):
        self.loaded = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def layer_everything(monkeypatch):
    """Write small tables as large ones."""
    monkeypatch.setattr(incremental_row_files, "LEAST_BYTES", 0)


def require_same(found, wanted):
    """Require states with the same bits."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert found[key].shape == value.shape, key
            if value.numel():
                found_bits, wanted_bits = (each.flatten().view(torch.uint8) for each in (found[key], value))
                assert torch.equal(found_bits, wanted_bits), key
        else:
            assert found[key] == value, key


def require_loads(folder: Path, wanted, mesh):
    """Require that a checkpoint gives the state that was saved as `table`."""
    target = TableState()
    load(folder, {"table": target}, mesh=mesh, random=False)
    require_same(target.loaded, wanted)


def layers_of(folder: Path, ids="table.ids"):
    """Return the names of the files that hold a table's rows, from the first to the last."""
    tables = json.loads((folder / "manifest.json").read_text())["tables"]
    return next((table["layers"] for table in tables if table["ids"] == ids), [])


def new_bytes(folder: Path):
    """Return the bytes of the files that no other checkpoint has."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.stat().st_nlink == 1)
