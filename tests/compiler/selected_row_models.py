"""Jobs that select rows by values, in the forms that scripts use: mixtures of experts, and losses of some rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rankless.torch_versions import find_torch_version

WIDTH, EXPERTS, CHOSEN = 4, 3, 2


class Expert(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """A layer of experts, each of which computes the tokens that a gate chooses; `form` is how this is written."""

    def __init__(self, form, dropout=0.0):
        super().__init__()
        self.gate, self.dropout = nn.Linear(WIDTH, EXPERTS), nn.Dropout(dropout)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.compute = FORMS[form]

    def forward(self, x):
        return self.compute(self, x.view(-1, WIDTH)).view(x.shape)

    def choose(self, x):
        return self.gate(x).softmax(-1).topk(CHOSEN)

    def choose_one(self, x):
        return self.gate(x).softmax(-1).max(-1)


def by_numbers(layer, x):
    """DeepSeek, nanoMoE."""
    (weights, chosen), out = layer.choose(x), torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        rows, places = torch.where(chosen == number)
        out[rows] += weights[rows, places, None] * layer.dropout(expert(x[rows]))
    return out


def by_numbers_if_any(layer, x):
    (weights, chosen), out = layer.choose(x), torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        rows, places = torch.where(chosen == number)
        if rows.numel() == 0:
            continue
        out[rows] += weights[rows, places, None] * expert(x[rows])
    return out


def by_mask_of_places(layer, x):
    """Mixtral: the mask has the tokens in its last dim."""
    (weights, chosen), out = layer.choose(x), torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number, expert in enumerate(layer.experts):
        places, rows = torch.where(mask[number])
        found = layer.dropout(expert(x[None, rows].reshape(-1, WIDTH))) * weights[rows, places, None]
        out.index_add_(0, rows, found.to(x.dtype))
    return out


def by_hit_experts(layer, x):
    """Mixtral, later: a loop over the experts that have tokens."""
    (weights, chosen), out = layer.choose(x), torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        places, rows = torch.where(mask[number].squeeze(0))
        out.index_add_(0, rows, layer.experts[number](x[rows]) * weights[rows, places, None])
    return out


def by_mask(layer, x):
    (weights, chosen), out = layer.choose_one(x), torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        mask = chosen == number
        if mask.any():
            out[mask] = out[mask] + weights[mask, None] * layer.dropout(expert(x[mask]))
    return out


def by_equal_masks(layer, x):
    (weights, chosen), out = layer.choose_one(x), torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        out[chosen == number] = weights[chosen == number].unsqueeze(-1) * expert(x[chosen == number])
    return out


def by_list_of_numbers(layer, x):
    (weights, chosen), out = layer.choose_one(x), torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        rows = (chosen == number).nonzero().squeeze(-1)
        found = expert(x.index_select(0, rows)) * weights.index_select(0, rows)[:, None]
        out = out.index_add(0, rows, found)
    return out


FORMS = {
    form.__name__: form
    for form in (
        by_numbers,
        by_numbers_if_any,
        by_mask_of_places,
        by_hit_experts,
        by_mask,
        by_equal_masks,
        by_list_of_numbers,
    )
}


def make_mixture_job(form, rows=12, dropout=0.0, length=None):
    """Return a job that trains a mixture, its modules and its arguments: rows, or rows of tokens."""
    torch.manual_seed(0)
    model = Mixture(form, dropout).double()

    def train(x, wanted):
        return (model(x) - wanted).square().mean()

    shape = (rows, WIDTH) if length is None else (rows, length, WIDTH)
    return train, {"model": model}, [torch.randn(shape, dtype=torch.float64) for _ in range(2)]


def select_targets(scores, labels):
    return F.cross_entropy(scores[labels != -100], labels[labels != -100])


def divide_by_number_of_targets(scores, labels):
    known = labels != -100
    return F.cross_entropy(scores[known], labels[known], reduction="sum") / known.sum()


def mean_of_selected_elements(scores, labels):
    return scores.masked_select((labels > 1)[:, None]).square().mean() + scores[scores > 0].mean()


def mean_of_selected_rows(scores, labels):
    rows = scores[labels > 0]
    return rows.square().mean() + rows.std(0).sum()


def softmax_over_selected_rows(scores, labels):
    (rows,) = (labels > 0).nonzero(as_tuple=True)
    return scores[rows].log_softmax(0).square().mean()


def divide_by_a_size(scores, labels):
    rows = scores[labels > 0]
    return rows.sum() / rows.shape[0] + rows.view(-1).sum()


def divide_by_len(scores, labels):
    rows = scores[labels > 0]
    return rows.sum() / len(rows)


def numbers_as_values(scores, labels):
    rows = (labels > 0).nonzero().squeeze(1)
    return (scores[rows] * torch.arange(rows.numel())[:, None] * rows[:, None]).mean(), rows


def rows_as_a_result(scores, labels):
    rows = scores[labels > 0]
    return torch.cat([rows, rows * 2]).mean(), rows


def similarities_of_selected_rows(scores, labels):
    rows = F.normalize(scores[labels > 0])
    return (rows @ rows.t()).square().mean()


def norms_of_selected_rows(scores, labels):
    rows = scores[labels > 0]
    normed = F.layer_norm(rows, (5,)).square() * torch.arange(5)
    return normed.sum() + F.batch_norm(rows, None, None, training=True).pow(3).mean()


def questions_of_the_backward_pass(scores, labels):
    rows = scores[labels > 0]
    return rows.cumsum(0).square().mean() + torch.cat([rows, rows[1:]]).var(correction=0)


def selection_of_a_selection(scores, labels):
    known = labels != -100
    rows, classes = scores[known], labels[known]
    return rows[classes > 1].square().sum() + rows[classes == 0].mean()


def columns_of_selected_places(scores, _labels):
    rows, columns = torch.where(scores.detach() > 0)
    return scores[rows, columns].sum() + scores[rows].square().mean()


def slices_of_selected_rows(scores, labels):
    rows = scores[labels != -100]
    return rows[:3].sum() + rows[1:].square().mean() + rows.flip(0)[0].sum()


def rows_in_blocks(scores, labels):
    rows = scores[labels > 0]
    return (rows.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 5) * torch.arange(5)).square().mean()


def losses_per_row(scores, labels):
    known = labels != -100
    out = torch.zeros(len(labels), dtype=scores.dtype)
    out[known] = F.cross_entropy(scores[known], labels[known], reduction="none")
    return out.sum() / known.sum().clamp(min=1)


def boolean_assignment(scores, labels):
    scores = scores.clone()
    scores[labels < 0] = 0
    return scores.square().mean()


LOSSES = {
    loss.__name__: loss
    for loss in (
        select_targets,
        divide_by_number_of_targets,
        mean_of_selected_elements,
        mean_of_selected_rows,
        softmax_over_selected_rows,
        divide_by_a_size,
        divide_by_len,
        numbers_as_values,
        rows_as_a_result,
        similarities_of_selected_rows,
        norms_of_selected_rows,
        questions_of_the_backward_pass,
        selection_of_a_selection,
        columns_of_selected_places,
        slices_of_selected_rows,
        rows_in_blocks,
        losses_per_row,
        boolean_assignment,
    )
}

LABELS = (3, -100, 2, 0, -100, 1, 4, -100, 0, 2, 2, -100)


def make_loss_job(loss, labels=LABELS):
    """Return a job that trains a layer by a loss of some rows, its modules and its arguments."""
    if loss == "questions_of_the_backward_pass" and find_torch_version().startswith("2.12"):
        pytest.skip("PyTorch 2.12 cannot trace the larger one of two numbers of rows; the job raises CaptureError")
    torch.manual_seed(0)
    layer, compute = nn.Linear(WIDTH, 5).double(), LOSSES[loss]

    def train(x, labels):
        return compute(layer(x), labels)

    return train, {"model": layer}, [torch.randn(len(labels), WIDTH, dtype=torch.float64), torch.tensor(labels)]
