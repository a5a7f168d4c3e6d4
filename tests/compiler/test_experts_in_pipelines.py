"""The axis expert in a pipeline: it divides each microbatch, and the training is that of one device."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from mixture_models import EXPERTS, HIDDEN, LENGTH, WIDTH, make_mixture
from support.grid_jobs import check_equal, float64_by_default, make_grid_job
from support.processes import on_mesh
from torch import nn

from rankless.context.world import RunSettings
from rankless.errors import CaptureError
from rankless.parallel.mesh import Mesh
from rankless.parallel.user_plan import Plan

WORDS, MICROBATCHES, SLOTS = 30, 3, 2


class Layer(nn.Module):
    """Experts with slots for each sample, dropout between their products, and a loss of balance within each sample."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)

    def forward(self, x):  # samples, words, width
        words = self.norm(x)
        chances = self.router(words).softmax(-1)
        weights, chosen = chances.max(-1)
        masks = F.one_hot(chosen, EXPERTS)
        order = ((masks.cumsum(1) - 1) * masks).sum(-1).clamp(max=SLOTS)
        places = (masks.unsqueeze(-1) * F.one_hot(order, SLOTS + 1)[..., :SLOTS].unsqueeze(-2)).to(x.dtype)
        features = F.gelu(torch.einsum("bwes,bwd,edh->ebsh", places, words, self.up))
        results = torch.einsum("ebsh,ehd->ebsd", F.dropout(features, 0.2), self.down)
        balance = (masks.to(x.dtype).mean(1) * chances.mean(1)).sum(-1).mean()
        return x + torch.einsum("bwes,ebsd->bwd", places * weights[..., None, None], results), balance


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        hidden, balance = self.words(ids), 0.0
        for layer in self.layers:
            hidden, term = layer(hidden)
            balance = balance + term
        return self.head(hidden), balance


class Programs:
    """Keeps the collectives of a job's programs."""

    def __init__(self):
        self.collectives = []

    def record(self, _job, local):
        self.collectives.append([(item.kind, item.value, item.axis) for item in local.collectives])

    def run(self, _job, bound, values, sizes):
        return bound.local(values, sizes)

    def finish(self, _known):
        pass


def train(mesh, sizes, rows, schedule="1f1b", zero=None, clip_norm=None):
    """Return what a training returns on this worker, and the collectives of its program."""
    with float64_by_default():
        torch.manual_seed(0)
        model, programs = Mixture(), Programs()
        ids, labels = torch.randint(0, WORDS, (2, rows, LENGTH))
        labels[: rows // 2, 1:] = -100

        def loss(ids, labels):
            order = torch.randperm(ids.shape[0])
            logits, balance = model(ids[order])
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return losses.sum() / (labels >= 0).sum() + 0.1 * balance, losses, logits.argmax(-1)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plan = Plan(schedule=schedule, microbatches=MICROBATCHES)
        options = {"zero": zero, "clip_norm": clip_norm, "settings": RunSettings(programs=programs)}
        job, _ = make_grid_job(loss, model, optimizer, mesh, sizes, plan, **options)
        found = [item.detach() for _ in range(3) for item in job(ids, labels)]
        values = [*found, *[item.detach().clone() for item in model.parameters()], torch.get_rng_state()]
        return values, programs.collectives


EXPERTS_IN_STAGES = {"pipeline": 2, "expert": 2}
CASES = [
    (EXPERTS_IN_STAGES, 11, {}),
    (EXPERTS_IN_STAGES, 12, {"schedule": "zero-bubble", "clip_norm": 0.1}),
    (EXPERTS_IN_STAGES, 5, {"schedule": "gpipe"}),
    ({"pipeline": 2, "expert": 3}, 10, {}),
    ({"pipeline": 2, "data": 2, "expert": 2}, 17, {"zero": "parameters", "clip_norm": 0.1}),
    ({"pipeline": 2, "expert": 2, "tensor": 2}, 9, {}),
]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("sizes", "rows", "options"), CASES, ids=str)
def test_a_mixture_in_a_pipeline_is_the_training_of_one_device(sizes, rows, options):
    wanted, _ = train(Mesh.solo(), {}, rows, **options)
    for found, _ in on_mesh(math.prod(sizes.values()), train, sizes, rows, *astuple(options)):
        check_equal(found, wanted)


def astuple(options):
    return options.get("schedule", "1f1b"), options.get("zero"), options.get("clip_norm")


@pytest.mark.exhaustive
def test_samples_move_in_each_microbatch_and_stages_gather_only_their_arguments():
    for rank, (_, (moves,)) in enumerate(on_mesh(4, train, EXPERTS_IN_STAGES, 12)):
        assert not [value for kind, value, _ in moves if kind == "all_gather" and value.endswith((".up", ".down"))]
        moved = Counter(kind for kind, _, axis in moves if axis == "expert")
        assert moved["all_to_all"] >= 2 * MICROBATCHES
        assert moved["all_to_all"] % MICROBATCHES == 0
        arguments = {value for _, value, axis in moves if axis == "expert" and value.startswith("argument")}
        assert arguments == {f"argument {rank // 2}"}  # words in the first stage, labels in the last one


def train_with_slots_of_the_batch(mesh):
    function, modules, arguments = make_mixture("switch")
    optimizer = torch.optim.SGD(modules["model"].parameters(), lr=0.1)
    job, _ = make_grid_job(function, modules["model"], optimizer, mesh, EXPERTS_IN_STAGES)
    job(*arguments)


@pytest.mark.exhaustive
def test_slots_of_the_whole_batch_are_refused_by_name():
    with pytest.raises(CaptureError, match=r"cumsum of model.mixture \(Switch\), which needs the whole batch"):
        on_mesh(4, train_with_slots_of_the_batch)
