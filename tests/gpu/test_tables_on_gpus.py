"""A table, whose rows are in the memory of the host, in a training on a GPU."""

import re

import pytest
from support.warm_runs import rankless, run_script

TRAINING = """
import sys
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
ids = torch.arange(-10, 10) * 400_000_000_000_000_003
table = rankless.parameter_server.Embedding(8, seed=1, device="cuda")
plain = torch.nn.Embedding(20, 8, sparse=True, device="cuda")
plain.weight.data.copy_(table(ids).detach())
layers = [torch.nn.Linear(16, 1).cuda() for _ in range(2)]
layers[1].load_state_dict(layers[0].state_dict())
embeddings = [table, plain]
sparse = [torch.optim.{optimizer} for embedding in embeddings]
dense = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in layers]
scalers = [torch.amp.GradScaler("cuda", init_scale=64.0) for _ in embeddings]

places = torch.randint(0, 20, (30, 2))
targets = torch.randn(30, 1)
for start in range(0, 30, 6):
    batch, wanted = places[start : start + 6], targets[start : start + 6].cuda()
    for number, looked_up in enumerate([ids[batch], batch]):
        sparse[number].zero_grad()
        dense[number].zero_grad()
        rows = embeddings[number](looked_up.cuda()).cuda()
        loss = F.mse_loss(layers[number](rows.flatten(1)), wanted)
        scalers[number].scale(loss).backward()
        scalers[number].step(sparse[number])
        scalers[number].step(dense[number])
        scalers[number].update()
difference = (table(ids.cuda()) - plain.weight).abs().max()
print("RESULT", float(difference), float((layers[0].weight - layers[1].weight).abs().max()), table.statistics().rows)
"""
OPTIMIZERS = [
    "SGD(embedding.parameters(), lr=0.1, momentum=0.9)",
    "Adagrad(embedding.parameters(), lr=0.1)",
    "SparseAdam(list(embedding.parameters()), lr=0.02)",
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_trains_as_an_embedding_of_the_gpu_does(tmp_path, optimizer):
    text = TRAINING.format(optimizer=optimizer)
    done = run_script(text, "-n", "1", "--no-progress", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table, layer, rows = re.search("RESULT (.*)", done.stdout).group(1).split()
    assert float(table) < 1e-12
    assert float(layer) < 1e-12
    assert int(rows) == 20


JOB = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
table = rankless.parameter_server.Embedding(8, seed=1, device="cuda")
layer = torch.nn.Linear(16, 1).cuda()
sparse = torch.optim.Adagrad(table.parameters(), lr=0.1)
dense = torch.optim.AdamW(layer.parameters(), lr=1e-2)

@rankless.job(model=torch.nn.ModuleList([table, layer]), optimizer=[sparse, dense])
def train(ids, targets):
    return F.mse_loss(layer(table(ids).flatten(1)), targets)

for _ in range(5):
    train(torch.randint(0, 20, (6, 2)), torch.randn(6, 1).cuda())
"""


def test_verify_compares_the_job_of_a_table(tmp_path):
    (tmp_path / "script.py").write_text(JOB)
    done = rankless("verify", "-n", "1", "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
