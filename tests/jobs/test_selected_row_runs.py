"""Jobs that select rows by values, with real processes: mixtures of experts as scripts write them."""

import pytest
from support.warm_runs import rankless

SCRIPT = """
import torch, torch.nn.functional as F
from torch import nn
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            {condition}
            out[rows] += weights[rows, places, None] * expert(x[rows])
        return out


model = nn.Sequential(Mixture(), nn.Dropout(0.2), nn.Linear(8, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)


@rankless.job(model=model, optimizer=optimizer{options})
def train(inputs, labels):
    scores, known = model(inputs), labels != -100
    return F.cross_entropy(scores[known], labels[known]), scores[known]


labels = torch.randint(0, 5, (38,))
labels[::3] = -100
data = torch.utils.data.TensorDataset(torch.randn(38, 8), labels)
for inputs, labels in rankless.loader(data, batch_size=10, shuffle=True):
    loss, scores = train(inputs, labels)
    print(f"{{float(loss):.12f}}", tuple(scores.shape))
print(f"{{sum(float(item.detach().abs().sum()) for item in model.parameters()):.10f}}")
"""
SKIPS = "if rows.numel() == 0: continue"


def write(folder, options="", condition=""):
    (folder / "train.py").write_text(SCRIPT.format(options=options, condition=condition))


SETTINGS = {
    "plain": ("", ""),
    "skips experts without rows": ("", SKIPS),
    "accumulates and clips": (", accumulate=2, clip_norm=0.1", ""),
    "divides parameters": (', zero="parameters"', ""),
    "computes again": (", recompute=1.0", SKIPS),
    "draws by counter": (', random="counter"', ""),
    "is not captured": (", capture=False", SKIPS),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_mixture_is_the_same_training(tmp_path, name):
    write(tmp_path, *SETTINGS[name])
    done = rankless("verify", "-n", "2", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "data=2,expert=2"])
def test_a_mixture_is_the_same_training_on_a_mesh(tmp_path, mesh):
    write(tmp_path)
    done = rankless("verify", "--mesh", mesh, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        *[
            (mesh, name)
            for mesh in ("pipeline=2", "pipeline=2,data=2", "pipeline=2,tensor=2", "pipeline=2,expert=2")
            for name in ("plain", "skips experts without rows", "computes again")
        ],
        ("pipeline=2,data=2", "divides parameters"),
    ],
)
def test_a_mixture_in_a_pipeline_is_the_same_training(tmp_path, mesh, name):
    write(tmp_path, *SETTINGS[name])
    done = rankless("verify", "--mesh", mesh, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_counts_the_sizes_of_selected_rows_as_if_all_were_selected(tmp_path):
    write(tmp_path)
    done = rankless("plan", "-n", "2", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "operators without a sharding rule: none" in done.stdout
