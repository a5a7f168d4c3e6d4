"""Runs and comparisons of scripts on meshes with other axes than `data`, with real processes."""

from pathlib import Path

from support import model_trainings
from support.model_trainings import SCRIPTS
from support.warm_runs import rankless

SETTINGS = {
    "plain": (),
    "sgd": ("--optimizer", "sgd", "--clip", "0.1"),
    "muon": ("--optimizer", "muon"),
    "accumulated": ("--accumulate", "2", "--clip", "0.1"),
    "recomputed": ("--recompute", "1.0", "--random", "counter"),
    "bfloat16": ("--bfloat16",),
}
"""Options of train_models.py."""
SCRIPT = """
import torch, torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = {model}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer{options})
def train(images, labels):
    return F.cross_entropy(model(images), labels)

@rankless.job(model=model)
def predict(images):
    return model(images).argmax(1)

data = torch.utils.data.TensorDataset(torch.randn(38, 8), torch.randint(0, 8, (38,)))
for images, labels in rankless.loader(data, batch_size=10, shuffle=True):
    loss = train(images, labels)
{end}
print(f"loss {{float(loss):.12f}}, right {{int((predict(data.tensors[0]) == data.tensors[1]).sum())}}")
"""


def verify(folder: Path, mesh: str, *arguments: str) -> None:
    """Assert that a model of train_models.py is the same training on a mesh and on one device."""
    model_trainings.verify(folder, ("--mesh", mesh), *arguments)


def resume(folder: Path, options: tuple[str, ...], action: str, zero: str = "none") -> list[float]:
    """Return the last loss, and the sum of each parameter, of resume.py, which saves a checkpoint or continues it."""
    command = ("run", *options, "--seed", "3", "-q", str(SCRIPTS / "resume.py"), action, zero)
    done = rankless(*command, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(word) for word in done.stdout.split()]
