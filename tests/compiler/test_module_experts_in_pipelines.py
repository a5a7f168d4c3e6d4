"""Experts that are modules, in a pipeline: each is on one worker of its stage, and the training is the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from mixture_models import LENGTH, LOOPS, WIDTH
from support.grid_jobs import check_equal, float64_by_default, make_grid_job
from support.processes import on_mesh
from torch import nn

from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import find_only_rank
from rankless.parallel.user_plan import Plan

WORDS = 30
LINEAR_TERMS = ("loop on the residual", "results in one tensor", "two gates", "slots and a loop")
"""Forms with a loss of balance that is a sum over samples. Products of means need the whole batch."""


class Mixture(nn.Module):
    """Two layers of experts, with the embedding of words for the scores, too."""

    def __init__(self, form):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([LOOPS[form](), LOOPS[form]()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.has_term = form in LINEAR_TERMS

    def forward(self, ids):
        hidden, balance = self.words(ids), 0.0
        for layer in self.layers:
            hidden, term = layer(hidden)
            balance = balance + term if self.has_term else balance
        return self.head(self.norm(hidden)), balance


def train(mesh, form, sizes, rows, schedule="1f1b", zero=None, clip_norm=None, stages=None):
    """Return the values of three steps and the trained model, and the rank along `expert` of each divided parameter."""
    with float64_by_default():
        torch.manual_seed(0)
        model = Mixture(form)
        ids, labels = torch.randint(0, WORDS, (2, rows, LENGTH))
        labels[: rows // 2, 1:] = -100

        def loss(ids, labels):
            logits, balance = model(ids)
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return losses.sum() / (labels >= 0).sum() + 0.1 * balance, losses

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        plan = Plan(schedule=schedule, microbatches=3, stages=stages if mesh.size > 1 else None)
        job, world = make_grid_job(loss, model, optimizer, mesh, sizes, plan, zero=zero, clip_norm=clip_norm)
        found = [item.detach() for _ in range(3) for item in job(ids, labels)]
        placements = {
            name: find_only_rank(placed["expert"])
            for name, item in model.named_parameters()
            if "expert" in (placed := world.owner.find_value_placements(item))
        }
        return [*found, *[item.detach().clone() for item in model.parameters()], torch.get_rng_state()], placements


def check(form, sizes, rows, *options):
    """Check a training against one device, and return the ranks of the parameters of experts, by name."""
    wanted, _ = train(Mesh.solo(), form, {}, rows, *options)
    outcomes = on_mesh(math.prod(sizes.values()), train, form, sizes, rows, *options)
    for found, ranks in outcomes:
        assert ranks == outcomes[0][1]
        check_equal(found, wanted)
    return outcomes[0][1]


SMALL = {"pipeline": 2, "expert": 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "form",
    [
        "loop",
        "loop with five experts",
        "loop with dropout",
        "loop with gated experts",
        "convolutions",
        "recurrent experts",
        *LINEAR_TERMS,
    ],
)
def test_each_expert_is_on_one_worker_of_its_stage(form):
    ranks = check(form, SMALL, 7)
    assert set(ranks.values()) == {0, 1}
    assert {name.split(".")[1] for name in ranks} == {"0", "1"}, "both layers are divided"
    assert all("experts" in name for name in ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "rows", "options"),
    [
        (SMALL, 11, ("gpipe", None, 0.1)),
        (SMALL, 9, ("zero-bubble",)),
        (SMALL, 8, ("interleaved",)),
        ({"pipeline": 2, "expert": 3}, 10, ()),
        ({"pipeline": 2, "data": 2, "expert": 2}, 17, ("1f1b", "parameters", 0.1)),
        ({"pipeline": 2, "expert": 2, "tensor": 2}, 9, ("1f1b", None, 0.1)),
    ],
    ids=str,
)
def test_with_other_schedules_and_axes(sizes, rows, options):
    check("loop", sizes, rows, *options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["loop", "slots and a loop", "results in one tensor"])
@pytest.mark.parametrize("border", ["model.layers.1.experts.1", "model.layers.0.experts.3"])
def test_a_stage_may_end_between_the_experts_of_a_layer(form, border):
    check(form, SMALL, 7, "1f1b", None, None, (border,))
