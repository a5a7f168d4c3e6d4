"""An explicit `flush()` is a step of its own on servers, which later reads see, also after a worker was killed."""

import pytest
import torch
from support.jobs import run_script

pytestmark = pytest.mark.slow
pytest.importorskip("zmq")
pytest.importorskip("numba")

SCRIPT = """
import os, torch, rankless
from torch import nn
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
embedding = nn.Embedding(20, 3, sparse=True)
optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)


@rankless.job(model=embedding, optimizer=optimizer, accumulate=2)
def train(ids):
    return embedding(ids).square().mean()


@rankless.job(model=embedding)
def predict(ids):
    return embedding(ids).sum()


found = []
for epoch in range(3):
    for start in (0, 5, 9):
        train(torch.arange(10) + start)
    train.flush()
    if epoch == 1 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), 9)
    found.append(float(predict(torch.arange(20))))
rankless.once(lambda: torch.save(found, "found.pt"))
"""


def plain_predictions() -> list[float]:
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
    torch.set_rng_state(generator_state)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        for starts in ((0, 5), (9,)):
            optimizer.zero_grad()
            losses = [embedding(torch.arange(10) + start).square().mean() for start in starts]
            (sum(losses) / len(losses)).backward()
            optimizer.step()
        found.append(float(embedding(torch.arange(20)).detach().sum()))
    return found


@pytest.mark.exhaustive
def test_predictions_see_a_flushed_step_after_the_first_worker_is_killed(tmp_path):
    done = run_script(SCRIPT, "--servers", "2", "--workers", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "; 2 workers continue" in done.stderr
    assert torch.load(tmp_path / "found.pt") == pytest.approx(plain_predictions(), rel=0, abs=1e-10)
