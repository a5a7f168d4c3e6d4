"""Runs on meshes with the axis `sequence`: scripts in several forms print what one device prints."""

import json
import re
from pathlib import Path

import pytest
from mesh_runs import SETTINGS, verify
from support.warm_runs import rankless

HEAD = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

def make_layers(**options):
    return [torch.nn.TransformerEncoderLayer(16, 4, 32, 0.1, norm_first=True, **options) for _ in range(2)]
"""
FORMS = {
    "masks, several arguments and a nested one": """
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(40, 16), torch.nn.Embedding(16, 16)
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 40)

    def forward(self, words, mask):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        x = x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return self.head(self.norm(x).cumsum(1) + x.roll(1, 1) + x.flip(1))

model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@rankless.job(model=model, optimizer=optimizer, clip_norm=0.5)
def train(batch, weights):
    scores = model(batch["words"], batch["mask"])
    losses = F.cross_entropy(scores.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * weights[:, None] * ~batch["mask"]).sum() / (~batch["mask"]).sum()

for length in (9, 9, 6):
    words = torch.randint(0, 40, (4, length))
    mask = torch.arange(length)[None] >= torch.randint(3, length + 1, (4, 1))
    batch = {"words": words, "labels": words.roll(-1, 1), "mask": mask}
    print(f"{float(train(batch, torch.rand(4))):.11f}")
""",
    "lengths that vary": """
model = torch.nn.Sequential(torch.nn.Embedding(40, 16), *make_layers(batch_first=True), torch.nn.Linear(16, 40))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@rankless.job(model=model, optimizer=optimizer)
def train(words, labels):
    return F.cross_entropy(model(words).flatten(0, 1), labels.flatten(), ignore_index=3)

for length in (9, 12, 7, 10, 8, 3, 1, 11):
    words = torch.randint(0, 40, (4, length + 1))
    print(f"{float(train(words[:, :-1], words[:, 1:])):.11f}")
""",
    "time first, with results for each position": """
model = torch.nn.Sequential(torch.nn.Linear(5, 16), *make_layers(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

@rankless.job(model=model, optimizer=optimizer, batch_dims={"x": 1, "y": 1})
def train(x, y):
    found = model(x)
    return (found - y).square().mean(), found

@rankless.job(model=model, batch_dims={"x": 1})
def predict(x):
    return model(x)

for _ in range(4):
    loss, found = train(torch.randn(7, 6, 5), torch.randn(7, 6, 3))
    print(f"{float(loss):.11f} {float(found.square().sum()):.9f}", tuple(found.shape))
model.eval()
print(f"{float(predict(torch.randn(7, 6, 5)).square().sum()):.9f}")
""",
    "images, and a recurrent network": """
parts = {"conv": torch.nn.Conv2d(3, 4, 3, padding=1), "cells": torch.nn.GRU(8, 12, batch_first=True)}
model = torch.nn.ModuleDict({**parts, "head": torch.nn.Linear(12, 5)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@rankless.job(model=model, optimizer=optimizer, plan=rankless.Plan(sequence={"images": 2}))
def train(images, labels):
    states, last = model["cells"](model["conv"](images).mean(1))
    return F.cross_entropy(model["head"](states.mean(1) + last[0]), labels)

data = torch.utils.data.TensorDataset(torch.randn(14, 3, 6, 8), torch.randint(0, 5, (14,)))
for images, labels in rankless.loader(data, batch_size=4, shuffle=True):
    print(f"{float(train(images, labels)):.11f}")
""",
}
LANGUAGE = HEAD + FORMS["lengths that vary"].replace(
    "optimizer=optimizer)", "optimizer=optimizer, plan=rankless.Plan(sequence={given}))"
).replace("(9, 12, 7, 10, 8, 3, 1, 11)", "(8, 8)")


def run_script(folder: Path, text: str, *options: str) -> list[float]:
    (folder / "train.py").write_text(text)
    found = rankless("run", "--seed", "1", "-q", *options, "train.py", folder=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    return [float(word) for word in re.findall(r"-?\d+\.?\d*", found.stdout)]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["sequence=2", pytest.param("data=2,sequence=2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("form", FORMS)
def test_a_script_prints_what_one_device_prints(tmp_path, form, mesh):
    wanted = run_script(tmp_path, HEAD + FORMS[form])
    assert wanted
    assert run_script(tmp_path, HEAD + FORMS[form], "--mesh", mesh) == pytest.approx(wanted, rel=1e-9, abs=1e-10)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_wrong_dim_is_right_and_a_saved_plan_keeps_it(tmp_path):
    wanted = run_script(tmp_path, LANGUAGE.replace("{given}", "'auto'"))
    for given in ("{'words': 0, 'labels': 0}", "{'words': None}", "{'words': 1, 'labels': None}"):
        text = LANGUAGE.replace("{given}", given)
        assert run_script(tmp_path, text, "--mesh", "sequence=2") == pytest.approx(wanted, rel=1e-9)
        saved = rankless("plan", "--mesh", "sequence=2", "--save", "plan.json", "train.py", folder=tmp_path)
        assert saved.returncode == 0, saved.stderr
        assert run_script(tmp_path, text, "-n", "2", "--plan", "plan.json") == pytest.approx(wanted, rel=1e-9)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["jobs"]["train"]["positions"] == {"words": 1, "labels": None}


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("{'word': 1}", "found:    'word': 1"),
        ("{'words': 2}", "found:    'words': 2 for 2 dims"),
        ("{'words': -1}", "found:    sequence={'words': -1}"),
        ("1", "found:    sequence=1"),
    ],
)
def test_what_names_no_positions_is_refused(tmp_path, given, text):
    (tmp_path / "train.py").write_text(LANGUAGE.replace("{given}", given))
    found = rankless("run", "--mesh", "sequence=2", "train.py", folder=tmp_path)
    assert found.returncode != 0
    assert text in found.stdout + found.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_shows_the_exchanges_of_attention(tmp_path):
    text = HEAD.replace("0.1,", "0.0,") + FORMS["lengths that vary"].replace("(9, 12, 7, 10, 8, 3, 1, 11)", "(8,)")
    (tmp_path / "train.py").write_text(text)
    found = rankless("plan", "--mesh", "sequence=2", "--json", "plan.json", "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    (job,) = json.loads((tmp_path / "plan.json").read_text())["jobs"]
    moves = [move for move in job["program"]["moves"] if move["bytes"] >= 4 * 8 * 16 * 8]
    assert {(move["kind"], move["axis"]) for move in moves if move["purpose"] == "input"} == {
        ("all_to_all", "sequence")
    }
    assert len(moves) >= 2 * 4 * 2


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "setting"), [("gpt", "data=2,sequence=2", "accumulated")])
def test_a_model_with_divided_positions_is_the_same_training(tmp_path, model, mesh, setting):
    verify(tmp_path, mesh, "--model", model, *SETTINGS[setting])


RING = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        parts = self.project(self.norm(x)).unflatten(2, (3, 2, 8)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)

model = torch.nn.Sequential(torch.nn.Embedding(40, 16), Layer(), Layer(), torch.nn.Linear(16, 40))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@rankless.job(model=model, optimizer=optimizer)
def train(words, labels):
    return F.cross_entropy(model(words).flatten(0, 1), labels.flatten())

for length in (9, 9, 6, 13, 3, 8):
    words = torch.randint(0, 40, (4, length + 1))
    print(f"{float(train(words[:, :-1], words[:, 1:])):.11f}")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_causal_attention_with_fewer_heads_than_workers_is_the_same_training(tmp_path):
    (tmp_path / "train.py").write_text(RING)
    found = rankless("verify", "--mesh", "sequence=4", "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "same training" in found.stdout


@pytest.mark.slow
def test_the_plan_shows_the_hops_of_a_ring_and_no_gather(tmp_path):
    (tmp_path / "train.py").write_text(RING.replace("(9, 9, 6, 13, 3, 8)", "(9,)"))
    found = rankless("plan", "--mesh", "sequence=3", "--json", "plan.json", "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    (job,) = json.loads((tmp_path / "plan.json").read_text())["jobs"]
    moves = [
        move for move in job["program"]["moves"] if move["purpose"] == "operator" and move["bytes"] >= 4 * 9 * 16 * 8
    ]
    assert {(move["axis"], move["bytes"], move["sent_bytes"]) for move in moves} == {
        ("sequence", 4 * 9 * 16 * 8, 4 * 3 * 16 * 8)
    }
    assert len(moves) == 2 * (2 + 4) * 2
    assert not [move for move in job["program"]["moves"] if move["gathered"]]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["sequence=2,tensor=2", pytest.param("data=2,sequence=3", marks=pytest.mark.exhaustive)]
)
def test_a_ring_within_other_axes_prints_what_one_device_prints(tmp_path, mesh):
    wanted = run_script(tmp_path, RING)
    assert run_script(tmp_path, RING, "--mesh", mesh) == pytest.approx(wanted, rel=1e-9, abs=1e-10)
