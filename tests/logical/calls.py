"""Functions of one (7, 5) batch, as people write them: for the logical view and for plain PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = Callable[[Tensor], Any]
LABELS = (torch.arange(7) * 3) % 5


def seeded(call: Call) -> Call:
    """Return a call after a seed."""

    def run(batch: Tensor) -> Any:
        torch.manual_seed(1)
        return call(batch)

    return run


def to_labels(batch: Tensor) -> Tensor:
    return (batch.detach() > 0).double()


LOSSES: dict[str, Call] = {
    "cross entropy, weights, smoothing": lambda t: F.cross_entropy(
        t, LABELS, weight=torch.arange(1.0, 6.0), label_smoothing=0.1
    ),
    "cross entropy, none": lambda t: F.cross_entropy(t, LABELS, reduction="none"),
    "cross entropy, ignored": lambda t: F.cross_entropy(t, LABELS.masked_fill(LABELS == 2, -100)),
    "nll": lambda t: F.nll_loss(F.log_softmax(t, 1), LABELS),
    "binary": lambda t: F.binary_cross_entropy(torch.sigmoid(t), to_labels(t)),
    "binary, logits": lambda t: F.binary_cross_entropy_with_logits(t, to_labels(t), pos_weight=torch.full((5,), 2.0)),
    "kl": lambda t: F.kl_div(F.log_softmax(t, 1), torch.full((7, 5), 0.2), reduction="batchmean"),
    "l1": lambda t: F.l1_loss(t, torch.zeros(7, 5)),
    "smooth l1": lambda t: F.smooth_l1_loss(t, torch.zeros(7, 5)),
    "huber": lambda t: F.huber_loss(t, torch.zeros(7, 5)),
    "triplet": lambda t: F.triplet_margin_loss(t, t.roll(1, 0), t.roll(2, 0)),
    "cosine": lambda t: F.cosine_embedding_loss(t, t * 2 + 1, torch.ones(7)),
    "multi margin": lambda t: F.multi_margin_loss(t * 1.1, LABELS),
    "poisson": lambda t: F.poisson_nll_loss(t / 5, torch.ones(7, 5)),
    "gaussian": lambda t: F.gaussian_nll_loss(t, torch.zeros(7, 5), torch.ones(7, 5)),
    "ctc": lambda t: F.ctc_loss(
        F.log_softmax(t.view(7, 1, 5).expand(7, 2, 5), 2),
        torch.tensor([[1, 2], [2, 3]]),
        torch.tensor([7, 7]),
        torch.tensor([2, 2]),
    ),
    "contrastive": lambda t: F.cross_entropy(F.normalize(t, dim=1) @ F.normalize(t, dim=1).T / 0.5, torch.arange(7)),
    "sum of losses": lambda t: sum([t.mean(), t.sum()]) / 2,
    "stacked losses": lambda t: torch.stack([t.mean(), t.sum(), (t * t).mean()]).mean(),
    "tensor of numbers": lambda t: torch.tensor([t.mean(), t.sum()]),
}

PRODUCTS: dict[str, Call] = {
    "einsum over rows": lambda t: torch.einsum("bi,bj->ij", t, t),
    "einsum": lambda t: torch.einsum("bi,ij->bj", t, torch.ones(5, 3)),
    "bmm": lambda t: torch.bmm(t.unsqueeze(2), t.unsqueeze(1)),
    "covariance": lambda t: torch.cov(t.T),
    "distances": lambda t: torch.cdist(t, t),
    "distances to many": lambda t: torch.cdist(t, torch.arange(150.0).view(30, 5).cos() * 9),
    "distances of many": lambda t: torch.cdist(torch.arange(150.0).view(30, 5).cos() * 9, t),
    "gram": lambda t: (t @ t.T, t.T @ t),
    "addmm": lambda t: torch.addmm(torch.ones(3), t, torch.ones(5, 3)),
    "attention": lambda t: torch.softmax(t.unsqueeze(2) @ t.unsqueeze(1), -1) @ t.unsqueeze(2),
    "sdpa": lambda t: F.scaled_dot_product_attention(*[t.view(7, 1, 5, 1)] * 3, is_causal=True),
    "inverse": lambda t: torch.linalg.inv(t.T @ t + torch.eye(5)),
    "determinant": lambda t: torch.linalg.det(t.T @ t / 50 + torch.eye(5)),
    "svd": torch.linalg.svdvals,
    "fft": lambda t: torch.fft.rfft(t, dim=1).abs(),
    "cosine similarity": lambda t: F.cosine_similarity(t, t.roll(1, 0)),
    "pairwise distance": lambda t: F.pairwise_distance(t, t.flip(0)),
}

INDEXING: dict[str, Call] = {
    "gather": lambda t: t.gather(1, LABELS.unsqueeze(1)),
    "scatter": lambda t: torch.zeros(7, 5).scatter(1, LABELS.unsqueeze(1), t[:, :1]),
    "rows by index": lambda t: t.index_select(0, torch.tensor([6, 0, 0])),
    "columns by index": lambda t: t.index_select(1, torch.tensor([4, 0])),
    "masked select": lambda t: t.masked_select(t.detach() > 0),
    "masked fill": lambda t: t.masked_fill(t.detach() > 0, -1.0),
    "mean of selected rows": lambda t: t[t.detach()[:, 0] > 0].mean(0),
    "columns by lists, ranges and arrays": lambda t: (
        *(t[:, [4, 0]], t[:, range(3, 0, -1)], t[:, numpy.array([[1], [2]])], t[:, numpy.int64(2)], t[:, [-1]]),
        *(t[[6, 0, 0, 5, 1, 2, 3]], t[[True, False] * 3 + [True]], t[range(7), LABELS], t[[], 1:]),
    ),
    "one of each row": lambda t: (
        *(t[torch.arange(7), LABELS], t[range(7), t.detach().argmax(1)], t[torch.arange(7), LABELS - 5]),
        *(t.view(7, 5, 1).expand(-1, -1, 2)[torch.arange(7), LABELS], t[torch.arange(7).flip(0), LABELS]),
        *(t[torch.arange(7), torch.tensor([-1])], t[:5][torch.arange(5), LABELS[:5]], t[torch.arange(7), LABELS, None]),
    ),
    "where": lambda t: torch.where(t.detach() > 0, t, t * 0.1),
    "nonzero": lambda t: (t.detach() > 3).nonzero(),
    "one hot": lambda t: F.one_hot(LABELS, 5) * t,
    "permuted rows": seeded(lambda t: 0.3 * t + 0.7 * t[torch.randperm(len(t))]),
    "rows in a loop": lambda t: torch.stack([row.sum() * number for number, row in enumerate(t)]),
    "slices of rows": lambda t: [t[start : start + 3].sum().item() for start in range(0, len(t), 3)],
    "embedding": lambda t: F.embedding(t.detach().long().clamp(0, 9), torch.arange(20.0).view(10, 2).requires_grad_()),
    "embedding bag": lambda t: F.embedding_bag(
        t.detach().long().clamp(0, 9), torch.arange(20.0).view(10, 2), mode="mean"
    ),
    "bucketize": lambda t: torch.bucketize(t.detach(), torch.tensor([0.0, 5.0])),
}

SHAPES: dict[str, Call] = {
    "flip": lambda t: (t.flip(0), t.flip(1)),
    "roll": lambda t: t.roll(2, 0),
    "repeat": lambda t: t.repeat(2, 3),
    "repeat interleave": lambda t: t.repeat_interleave(2, 0),
    "expand": lambda t: t.unsqueeze(1).expand(-1, 3, -1),
    "tril": lambda t: t.tril(),
    "unfold": lambda t: t.unfold(1, 3, 1),
    "diagonal": torch.diagonal,
    "transposes": lambda t: (t.T, t.mT, t.t(), t.movedim(0, 1)),
    "split": lambda t: (t.split([2, 3], 1), torch.hsplit(t, [2]), [chunk.sum() for chunk in t.chunk(3)]),
    "cat": lambda t: (torch.cat([t, t], 1), torch.cat([t, t], 0).mean(0), torch.vstack([t, torch.ones(1, 5)])),
    "meshgrid": lambda t: torch.meshgrid(t[:, 0], t[0], indexing="ij"),
    "the same shape": lambda t: (
        *(t.sum_to_size(7, 5), t.view(7, 5), t.reshape(7, 5), t.expand(7, 5), t.squeeze(), t.view_as(torch.ones(7, 5))),
        *(t.broadcast_to((7, 5)), t.expand_as(torch.ones(7, 5)), t.unflatten(0, (7,)), t[:2].clone().squeeze(0)),
    ),
    "reshape across rows": lambda t: (t.reshape(5, 7), t.view(35) * torch.arange(35.0)),
    "flatten and back": lambda t: t.flatten(0).view(7, 5).mean(1),
    "insert and remove": lambda t: t.unsqueeze(0).transpose(0, 1).squeeze(1),
    "pad": lambda t: F.pad(t, (1, 2, 0, 1)),
    "interpolate": lambda t: F.interpolate(t.view(7, 1, 5), scale_factor=2, mode="linear"),
    "casts": lambda t: ((t.float() * 2).double(), t.half().float(), t.type(torch.float32), t.type()),
}

REDUCTIONS: dict[str, Call] = {
    "cumulative": lambda t: (t.cumsum(0), t.cumsum(1)),
    "sort": lambda t: (t.sort(0), t.argsort(1), t.kthvalue(2, 1)),
    "median": lambda t: (t.median(1), t.median(), t.quantile(0.5)),
    "norms": lambda t: (t.norm(), t.norm(dim=0), t.norm(p=1)),
    "statistics": lambda t: (t.std(0), t.var(1, unbiased=False), t.mean(0)),
    "standardize": lambda t: (t - t.mean(0)) / (t.std(0) + 1e-6),
    "to a range": lambda t: (t - t.min()) / (t.max() - t.min()),
    "softmax over rows": lambda t: (F.softmax(t, 0), F.softmax(t.T, dim=0), torch.logsumexp(t, 0)),
    "product": lambda t: (t / 4).prod(0),
    "extremes": lambda t: (t.amax(0), t.amin(1), t.aminmax()),
    "histogram": lambda t: torch.histc(t.detach(), 4),
    "finite": lambda t: (torch.isfinite(t).all().item(), torch.isnan(t.sum()).item(), bool((t > 100).any())),
    "accuracy": lambda t: (t.argmax(1) == LABELS).sum().item() / len(t),
    "top-k accuracy": lambda t: (t.topk(3, 1)[1] == LABELS.view(-1, 1)).any(1).float().sum().item(),
    "numbers": lambda t: [item.item() for item in t.mean(1)],
    "numpy": lambda t: t.detach().numpy().mean(),
}

POINTWISE: dict[str, Call] = {
    "lerp and addcmul": lambda t: (torch.lerp(t, t * 2, 0.3), torch.addcmul(t, t, t, value=0.5)),
    "clamp": lambda t: t.clamp(-3, 3),
    "power": lambda t: (t.abs() + 1) ** 1.5,
    "remainders": lambda t: (t % 3, t // 2, t.sign()),
    "added to itself detached": lambda t: t + t.detach(),
    "gated": lambda t: F.glu(t[:, :4]),
    "layer norm": lambda t: F.layer_norm(t, (5,)),
    "group norm": lambda t: F.group_norm(t.view(7, 5, 1), 5),
    "rms norm": lambda t: F.rms_norm(t, (5,)),
    "normalize": F.normalize,
    "in place": lambda t: (F.relu(t * 1.0, inplace=True), t.clone().add_(t).mul_(2)),
}

RANDOM: dict[str, Call] = {
    "gumbel": seeded(lambda t: F.gumbel_softmax(t, hard=True)),
    "rrelu": seeded(lambda t: F.rrelu(t, training=True)),
    "bernoulli": seeded(lambda t: torch.bernoulli(torch.sigmoid(t.detach()))),
    "noise like": seeded(lambda t: t + torch.randn_like(t)),
    "noise of a size": seeded(lambda t: t + torch.randn(t.size(0), 5)),
    "integers like": seeded(lambda t: torch.randint_like(t.detach(), 0, 9)),
    "noise of old code": seeded(
        lambda t: (t.new(t.size()).normal_(), t.new(len(t), 2).uniform_(), t.new([1.0, 2.0]), t.new(t))
    ),
    "laplace": seeded(lambda t: torch.distributions.Laplace(t, 1.0).rsample()),
    "normal": seeded(lambda t: torch.normal(t.detach(), 1.0)),
    "categorical": seeded(lambda t: torch.distributions.Categorical(logits=t).log_prob(LABELS).mean()),
    "sample": seeded(lambda t: torch.distributions.Categorical(logits=t.detach()).sample()),
    "kl of normals": lambda t: torch.distributions.kl_divergence(
        torch.distributions.Normal(t, 1.0), torch.distributions.Normal(0.0, 1.0)
    ).sum(),
}


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(1, 3, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x.unsqueeze(-1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(1, 3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x.unsqueeze(-1))[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x, self.cell(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.heads = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        h = self.project(x.unsqueeze(-1))
        return self.heads(h, h, h)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.product(x, x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": Lstm,
    "gru": Gru,
    "cells": Cells,
    "heads": Heads,
    "products": Products,
    "encoder layer": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)),
        nn.Linear(1, 4),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.1),
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 3, 3, padding=1),
        nn.GroupNorm(3, 3),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
    ),
    "transposed convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.ConvTranspose1d(1, 2, 3, stride=2),
        nn.InstanceNorm1d(2, affine=True),
        nn.MaxPool1d(2),
    ),
    "activations": lambda: nn.Sequential(nn.PReLU(), nn.Linear(5, 4), nn.Softplus(), nn.LogSoftmax(1)),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.AlphaDropout(0.2), nn.Linear(8, 2)),
}
