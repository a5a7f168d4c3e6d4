"""Sums, extrema, operators along some dims, and random operators."""

import torch
import torch.nn.functional as F
from operator_cases import Case, labels_of, numbers, split

from rankless.torch_versions import find_torch_version

aten = torch.ops.aten

REDUCTIONS = {
    "sum": Case(lambda x: x.sum().square()),
    "sum over dims": Case(lambda x: x.sum(0).square().sum() + x.sum(1, keepdim=True).square()),
    "mean": Case(lambda x: x.mean().square()),
    "mean over dims": Case(lambda x: x.mean(0, keepdim=True).square().sum() + x.mean((0, 1)).square() + x.mean(1)),
    "mean of a partial sum": Case(lambda x: x.sum(0).mean().square()),
    "trace of a partial sum": Case(lambda x: x.sum(0).trace().square(), (4, 4)),
    "max and min": Case(lambda x: x.max() * x.min()),
    "amax and amin": Case(lambda x: x.amax(0).square() + x.amin(0) + x.amax(1).sum()),
    "tril and triu": Case(lambda x: x.tril(1).square() + x.triu(-1), (4, 4)),
    "softmax": Case(lambda x: x.softmax(1).square().sum() + x.softmax(0)),
    "safe softmax": Case(lambda x: aten._safe_softmax(x, 1).square()),
    "log softmax": Case(lambda x: x.log_softmax(1).square().sum() + x.log_softmax(0)),
    "argmax and argmin": Case(lambda x: (x.argmax(1) + x.argmin(1) + x.argmin(0).sum() + x.argmax()) * x[:, 0]),
    "max and min of a dim": Case(lambda x: x.max(1)[0].square().sum() + x.min(0)[0] + x.min(1)[0].sum()),
    "any and all": Case(lambda x: x * ((x > 0).any(1) & (x < 2).all(1))[:, None]),
    "any and all of dims": Case(lambda x: x * (x > 0).any((1, 2), True) * (x < 3).all((1, 2), True), (2, 3)),
    "prod": Case(lambda x: x.prod(1).square()),
    "cumsum and cumprod": Case(lambda x: x.cumsum(1).square() + x.cumprod(1) + x.cumsum(0)),
    "sort and topk": Case(lambda x: x.sort(1)[0].square().sum() + x.topk(2, 1)[0].square() + x.sort(0)[0].sum()),
    "flip": Case(lambda x: x.flip(1).square() + x.flip(0)),
    "logcumsumexp": Case(lambda x: x.logcumsumexp(1).square()),
    "var, std, norms and logsumexp": Case(lambda x: x.var(0) + x.std() + x.norm() + x.logsumexp(0) + x.std(1).sum()),
    "ones like a partial sum": Case(lambda x: torch.ones_like(x.sum(0)) * x + torch.full_like(x.sum(0), 3) * x),
}
SPLIT_REDUCTIONS = {
    "any and all of everything": split(lambda x: x * (x > 2).any() + x * (x > -9).all()),
    "any and all over the batch": split(
        lambda x: x * (x > 1).any(0) + x * (x > -1).all(0, True) + x * (x > 1).all((0, 1))
    ),
    "any of bytes": split(lambda x: x * (x > 1).to(torch.uint8).any(0)),
    "count of nonzeros": split(
        lambda x: (
            x * (x > 0).count_nonzero() + x * (x > 0).count_nonzero((0, 1)) + x * (x > 0).count_nonzero(1)[:, None]
        )
    ),
    "sum without NaN": split(
        lambda x: (lambda y: y.nansum() * y.nansum(0, keepdim=True) + y.nanmean(1, True))(
            torch.where(x > 1, torch.nan, x)
        )
    ),
    "sum of float16 without NaN": split(lambda x: x * torch.where(x > 1, torch.nan, x * 9e3).half().nansum(0).double()),
    "minimum and maximum": split(
        lambda x: x * torch.aminmax(x)[0].detach() + sum(torch.aminmax(x, dim=1, keepdim=True))
    ),
    "products over the batch": split(
        lambda x: x * x.detach().prod() + x * x.detach().prod(0, True) * (labels_of(x, 3) + 1).prod()
    ),
    "product of float16": split(lambda x: x * (x.detach().half() * 60).prod(0).double()),
    "deviation and mean": split(
        lambda x: sum(torch.std_mean(x, 1)).square() + sum(t.sum() for t in torch.std_mean(x, 0))
    ),
    "order statistics": split(
        lambda x: x.median(1)[0].square() + x.nanmedian(-1)[0] + x.mode(1)[0] + x.kthvalue(2, 1, True)[0][:, 0]
    ),
    "order statistics with ties": split(
        lambda x: (lambda y: y.median(1)[0] + y.kthvalue(2, 1)[0] + y.cummax(1)[0][:, 2])(x + (x > 0) * 9 - x.detach())
    ),
    "extrema so far": split(lambda x: x.cummax(1)[0].square() + x.cummin(1)[0]),
    "stable sort": split(lambda x: x.sort(dim=1, stable=True, descending=True)[0].square()),
    "histogram": split(lambda x: x * torch.histc(x.detach(), 6, -2, 2)),
    "renorm of rows": split(lambda x: x.renorm(2, 0, 1.0).square()),
    "renorm of columns": split(lambda x: (x + numbers(6)).renorm(1, 1, 1.0).square()),
    "distance": split(lambda x: torch.dist(x, x.cos())),
}
if find_torch_version().startswith("2.11"):
    del SPLIT_REDUCTIONS["minimum and maximum"]  # `aten.aminmax` has no derivative there
RANDOM = {
    "dropout": Case(lambda x: F.dropout(x, 0.4) + F.dropout(x.t(), 0.3).t()),
    "dropout of features": Case(lambda x: F.dropout1d(x, 0.4) + F.feature_alpha_dropout(x, 0.2), (4, 3)),
    "alpha dropout": Case(lambda x: F.alpha_dropout(x, 0.4, training=True)),
    "native dropout": Case(lambda x: torch.native_dropout(x, 0.4, True)[0]),
    "dropout of a partial sum": Case(lambda x: F.dropout(x.sum(0), 0.4) * x),
    "draws like the batch": Case(
        lambda x: x * torch.rand_like(x) + torch.randn_like(x.t()).t() + torch.randint_like(x, 9) * x
    ),
    "whole numbers like the batch": Case(lambda x: x * torch.randint_like(x, 2, 9, dtype=torch.int64)),
    "draws in place": Case(
        lambda x: (
            x * torch.empty_like(x).uniform_(1, 2)
            + torch.empty_like(x).normal_(1, 2)
            + torch.empty_like(x).exponential_()
            + torch.empty_like(x).cauchy_()
            + torch.empty_like(x).log_normal_()
            + torch.empty_like(x).geometric_(0.4)
            + torch.empty_like(x).random_()
            + torch.empty_like(x).random_(9)
            + torch.empty_like(x).bernoulli_(0.3)
            + x.detach().bernoulli(0.3)
        )
    ),
    "fresh draws": Case(
        lambda x: (
            x * torch.rand(6)
            + torch.randn(6)
            + torch.randint(9, (6,))
            + torch.randint(2, 9, (6,))
            + torch.randperm(6)
            + torch.normal(0.0, 1.0, (6,))
        )
    ),
    "draws by value": Case(
        lambda x: (
            x * torch.bernoulli(x.detach().sigmoid())
            + torch.normal(x.detach(), 1.0)
            + torch.normal(0.0, x.detach().abs())
            + torch.normal(x.detach(), x.detach().abs())
            + torch.poisson(x.detach().abs())
            + torch.multinomial(x.detach().abs(), 6, replacement=True)
        )
    ),
}
