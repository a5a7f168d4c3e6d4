"""Runs whose servers hold weights of sparse embeddings go on without killed workers."""

import random

import pytest
import torch
from support.jobs import run_script
from support.lost_weights import require_same_weights, run_killed_weights, run_plain_weights
from support.lost_workers import STEPS

pytestmark = pytest.mark.slow
pytest.importorskip("zmq")
pytest.importorskip("numba")


@pytest.fixture(scope="session")
def plain_weights(tmp_path_factory) -> dict:
    return run_plain_weights(tmp_path_factory.mktemp("plain_weights"))


def draw_kills(seed: int) -> str:
    """Return kills of one or two workers at random moments of calls, and between them."""
    drawn = random.Random(seed)
    named = [f"{name}{epoch}" for name in ("change", "predict", "once", "save") for epoch in range(3)]
    kills = []
    for worker in drawn.sample(range(3), drawn.choice((1, 1, 2))):
        moment = drawn.choice([*map(str, range(30)), *(f"schedule{call}.0" for call in range(1, 31)), *named])
        kills.append(f"{worker}:{moment}:{drawn.choice((0, drawn.uniform(0, 5), drawn.uniform(0, 60)))}")
    return ",".join(kills)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_kills_at_random_moments_change_no_weight(tmp_path, plain_weights, seed):
    done = run_killed_weights(tmp_path, draw_kills(seed), reads=seed % 3 == 0)
    assert done.returncode == 0, done.stderr
    require_same_weights(tmp_path, plain_weights)


MOMENTS = {
    "before the first call": "1:0:0",
    "in the first step": "1:steps0:0",
    "before the first weight is pushed, first worker": "0:steps7:0",
    "after two weights are pushed": "1:stepped7:0",
    "after two weights are pushed, first worker": "0:stepped7:0",
    "after all weights are pushed": "2:all7:0",
    "in the last step": "0:stepped29:0",
    "after the last step": "1:schedule30.2:0",
    "between schedules": "1:schedule8.1:0",
    "as the script changes a weight": "0:change0:0",
    "as another worker gives the servers a changed weight": "1:change1:0",
    "before a prediction": "0:predict1:0",
    "within a prediction": "2:predict1:1",
    "within once": "0:inside0:0",
    "before a save": "1:save0:0",
    "as a save reads the weights": "0:state1:0",
    "as a save reads the weights, another worker": "2:state1:0",
    "after the last save": "2:end:0",
    "two at once": "1:9:0,2:9:0",
    "two in one step": "1:steps9:0,2:stepped9:0",
    "two in one step, the first one after the last one": "0:all9:0,2:steps9:0",
    "one in the step after another one": "1:stepped9:0,0:stepped10:0",
    "one while the others form a group": "1:9:0,2:9:4",
    "all but one, one by one": "0:3:0,1:stepped12:0",
    "within the end of a pass": "1:schedule10.2:0",
    "in the first step of a pass": "2:steps10:0",
    "a server as well": "1:stepped8:0,server:schedule8.0:0",
    "a server in the step before": "server:schedule8.0:0,1:stepped8:0",
    "a server and a worker before a prediction": "server:predict0:0,2:predict0:0",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MOMENTS)
def test_kills_at_moments_of_a_step_change_no_weight(tmp_path, plain_weights, name):
    done = run_killed_weights(tmp_path, MOMENTS[name], reads="first" in name)
    assert done.returncode == 0, done.stderr
    assert "on\n" in done.stderr
    require_same_weights(tmp_path, plain_weights)


LATER = """
embedding = nn.Embedding(6, 4, sparse=True).double()
layer_of_embedding = nn.Linear(4, 1).double()
own = torch.optim.SGD([*embedding.parameters(), *layer_of_embedding.parameters()], lr=0.1)


@rankless.job(model=[embedding, layer_of_embedding], optimizer=own)
def train_embedding(ids):
    return layer_of_embedding(embedding(ids)).square().mean()


torch.manual_seed(3)
for parameter in (embedding.weight, *layer_of_embedding.parameters()):
    torch.nn.init.normal_(parameter)
for step in range(9):
    die_at(step, 3)
    train(torch.arange(6))
    if step > 5:
        train_embedding(torch.arange(6))
rankless.once(lambda: torch.save(embedding.weight.detach().clone(), "weight.pt"))
"""


def plain_later() -> torch.Tensor:
    embedding, layer = torch.nn.Embedding(6, 4, sparse=True).double(), torch.nn.Linear(4, 1).double()
    torch.manual_seed(3)
    for parameter in (embedding.weight, *layer.parameters()):
        torch.nn.init.normal_(parameter)
    optimizer = torch.optim.SGD([*embedding.parameters(), *layer.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(embedding(torch.arange(6))).square().mean().backward()
        optimizer.step()
    return embedding.weight.detach()


@pytest.mark.exhaustive
def test_servers_get_a_weight_first_after_a_worker_was_lost(tmp_path):
    done = run_script(STEPS + LATER, "--servers", "2", "--workers", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "weight.pt"), plain_later(), rtol=0, atol=1e-10)
