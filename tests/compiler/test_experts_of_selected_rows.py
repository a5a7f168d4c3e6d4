"""Experts that are modules, each on one rank, in loops that select the samples of each expert by their values."""

import pytest
import torch
import torch.nn.functional as F
from mixture_models import EXPERTS, LENGTH, ROWS, WIDTH, Loop, Words, make_expert
from test_expert_axis import check_expert_axis
from test_module_experts import find_owners

from rankless.parallel.tensor_placement import split_lengths


class Selecting(Loop):
    """A loop over experts; `add` adds what an expert returns for its samples."""

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return x + self.add(tokens, weights, chosen).view_as(x), weights.mean()


class InPlace(Selecting):
    def add(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            result[rows] += weights[rows, places, None] * expert(tokens[rows])
        return result


class IndexAdd(Selecting):
    def add(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            result.index_add_(0, rows, weights[rows, places, None] * expert(tokens[rows]))
        return result


class Mixtral(Selecting):
    """The tokens are in the last dim of the mask, so workers have selected rows in another order than one device."""

    def add(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        masks = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            places, rows = torch.where(masks[number])
            found = expert(tokens[None, rows].reshape(-1, WIDTH)) * weights[rows, places, None]
            result.index_add_(0, rows, found)
        return result


class Masks(Selecting):
    def add(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mask = chosen[:, 0] == number
            result[mask] = weights[mask, :1] * expert(tokens[mask])
        return result


class Conditions(Selecting):
    def add(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            result = result.index_add(0, rows, weights[rows, :1] * expert(tokens[rows]))
        return result


class Joined(Selecting):
    """All results in one tensor, in the order of experts."""

    def add(self, tokens, weights, chosen):
        rows = [(chosen[:, 0] == number).nonzero().squeeze(-1) for number in range(len(self.experts))]
        results = [expert(tokens[own]) * weights[own, :1] for expert, own in zip(self.experts, rows, strict=True)]
        return torch.zeros_like(tokens).index_add(0, torch.cat(rows), torch.cat(results))


FORMS = {
    "in place": InPlace,
    "index_add": IndexAdd,
    "index_add with dropout": lambda: IndexAdd(make=lambda: make_expert(dropout=0.3)),
    "mixtral": Mixtral,
    "masks": Masks,
    "conditions": Conditions,
    "joined": Joined,
}


def make_job(form, rows):
    torch.manual_seed(1)
    model = Words(FORMS[form]()).double()

    def train(ids, labels):
        logits, loss = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * loss

    ids = torch.randint(0, 30, (rows, LENGTH))
    return train, {"model": model}, [ids, ids.roll(-1, 1)]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("rows", [ROWS, 3])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_expert_computes_the_samples_of_all_ranks_that_chose_it(form, mesh, rows):
    outcome, states = check_expert_axis(*make_job(form, rows), mesh)
    ranks = [rank for rank, experts in enumerate(split_lengths(EXPERTS, mesh[-1])) for _ in range(experts)]
    assert find_owners(states) == dict(enumerate(ranks))
    assert not [item for item in outcome.local.collectives if item.value in states]


def test_only_selected_samples_move_and_together():
    outcome, _ = check_expert_axis(*make_job("in place", ROWS), (2,))
    moves = [item for item in outcome.local.collectives if item.purpose == "input" and not item.backward]
    samples = [item for item in moves if f"{WIDTH}]" in item.value]
    assert [item.kind for item in samples] == ["all_to_all"] + ["scatter"] * EXPERTS
