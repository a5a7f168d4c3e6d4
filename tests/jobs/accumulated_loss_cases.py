"""Losses for runs with `accumulate=`: each takes a model's output of shape (rows, 4) and the targets of a batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

CLASSES = 4
REDUCTIONS = ("mean", "sum", "none")


def values(rows):
    return (torch.randn(rows, CLASSES),)


def labels(rows):
    return (torch.randint(0, CLASSES, (rows,)),)


def ignored_labels(rows):
    found = torch.randint(0, CLASSES, (rows,))
    return (torch.where(torch.rand(rows) < 0.4, -100, found),)


def bits(rows):
    return (torch.randint(0, 2, (rows, CLASSES)).to(torch.get_default_dtype()),)


def signs(rows):
    return (torch.randint(0, 2, (rows, CLASSES)).to(torch.get_default_dtype()) * 2 - 1,)


def row_signs(rows):
    return torch.randn(rows, CLASSES), torch.randint(0, 2, (rows,)) * 2 - 1


def label_sets(rows):
    found = torch.rand(rows, CLASSES).argsort(1)
    return (torch.where(torch.arange(CLASSES) < torch.randint(1, CLASSES, (rows, 1)), found, -1),)


def pairs(rows):
    return torch.randn(rows, CLASSES), torch.randn(rows, CLASSES)


def masked(rows):
    return torch.randn(rows, CLASSES), (torch.rand(rows) < 0.6)


def weighted(rows):
    return torch.randint(0, CLASSES, (rows,)), torch.rand(rows) + 0.1


def paths(rows):
    lengths = torch.randint(1, 3, (rows,))
    return torch.randint(1, CLASSES, (rows, 2)), torch.full((rows,), 6), lengths


CLASS_WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 3.0], dtype=torch.float64)


def weights_like(out: Tensor) -> Tensor:
    return CLASS_WEIGHTS.to(out.dtype)


FUNCTIONS = {
    "l1": (values, lambda out, y, r: F.l1_loss(out, y, reduction=r)),
    "mse": (values, lambda out, y, r: F.mse_loss(out, y, reduction=r)),
    "smooth_l1": (values, lambda out, y, r: F.smooth_l1_loss(out, y, reduction=r)),
    "smooth_l1, beta 0": (values, lambda out, y, r: F.smooth_l1_loss(out, y, reduction=r, beta=0.0)),
    "huber": (values, lambda out, y, r: F.huber_loss(out, y, reduction=r, delta=0.5)),
    "nll": (labels, lambda out, y, r: F.nll_loss(out.log_softmax(1), y, reduction=r)),
    "nll, weights": (
        ignored_labels, lambda out, y, r: F.nll_loss(out.log_softmax(1), y, weights_like(out), reduction=r),
    ),
    "poisson_nll": (bits, lambda out, y, r: F.poisson_nll_loss(out, y, reduction=r)),
    "poisson_nll, full": (values, lambda out, y, r: F.poisson_nll_loss(out, y.exp(), full=True, reduction=r)),
    "poisson_nll, no log": (
        bits, lambda out, y, r: F.poisson_nll_loss(out.exp(), y, log_input=False, reduction=r),
    ),
    "gaussian_nll": (values, lambda out, y, r: F.gaussian_nll_loss(out, y, out.exp(), reduction=r)),
    "gaussian_nll, full": (
        values, lambda out, y, r: F.gaussian_nll_loss(out, y, out[:, :1].exp(), full=True, reduction=r),
    ),
    "gaussian_nll, number": (values, lambda out, y, r: F.gaussian_nll_loss(out, y, torch.ones_like(y), reduction=r)),
    "kl_div": (values, lambda out, y, r: F.kl_div(out.log_softmax(1), y.softmax(1), reduction=r)),
    "kl_div, log target": (
        values, lambda out, y, r: F.kl_div(out.log_softmax(1), y.log_softmax(1), reduction=r, log_target=True),
    ),
    "bce": (bits, lambda out, y, r: F.binary_cross_entropy(out.sigmoid(), y, reduction=r)),
    "bce, weights": (
        bits, lambda out, y, r: F.binary_cross_entropy(out.sigmoid(), y, weights_like(out), reduction=r),
    ),
    "bce with logits": (bits, lambda out, y, r: F.binary_cross_entropy_with_logits(out, y, reduction=r)),
    "bce with logits, weights": (
        bits,
        lambda out, y, r: F.binary_cross_entropy_with_logits(
            out, y, weights_like(out), pos_weight=weights_like(out), reduction=r
        ),
    ),
    "hinge_embedding": (signs, lambda out, y, r: F.hinge_embedding_loss(out, y, reduction=r)),
    "multilabel_margin": (label_sets, lambda out, y, r: F.multilabel_margin_loss(out, y, reduction=r)),
    "soft_margin": (signs, lambda out, y, r: F.soft_margin_loss(out, y, reduction=r)),
    "cross_entropy": (labels, lambda out, y, r: F.cross_entropy(out, y, reduction=r)),
    "cross_entropy, weights, ignored, smoothing": (
        ignored_labels,
        lambda out, y, r: F.cross_entropy(out, y, weights_like(out), label_smoothing=0.1, reduction=r),
    ),
    "cross_entropy, probabilities": (
        values, lambda out, y, r: F.cross_entropy(out, y.softmax(1), weights_like(out), reduction=r),
    ),
    "cross_entropy, probabilities, smoothing": (
        values, lambda out, y, r: F.cross_entropy(out, y.softmax(1), label_smoothing=0.2, reduction=r),
    ),
    "multilabel_soft_margin": (bits, lambda out, y, r: F.multilabel_soft_margin_loss(out, y, reduction=r)),
    "multilabel_soft_margin, weights": (
        bits, lambda out, y, r: F.multilabel_soft_margin_loss(out, y, weights_like(out), reduction=r),
    ),
    "cosine_embedding": (
        row_signs, lambda out, other, y, r: F.cosine_embedding_loss(out, other, y, margin=0.1, reduction=r),
    ),
    "margin_ranking": (
        row_signs,
        lambda out, other, y, r: F.margin_ranking_loss(out[:, 0], other[:, 0], y, margin=0.2, reduction=r),
    ),
    "multi_margin": (labels, lambda out, y, r: F.multi_margin_loss(out, y, reduction=r)),
    "multi_margin, p 2, weights": (
        labels, lambda out, y, r: F.multi_margin_loss(out, y, 2, weight=weights_like(out), reduction=r),
    ),
    "triplet": (pairs, lambda out, one, two, r: F.triplet_margin_loss(out, one, two, reduction=r)),
    "triplet, swap": (pairs, lambda out, one, two, r: F.triplet_margin_loss(out, one, two, swap=True, reduction=r)),
    "triplet with distance": (
        pairs,
        lambda out, one, two, r: F.triplet_margin_with_distance_loss(
            out, one, two, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), reduction=r
        ),
    ),
    "ctc": (
        paths,
        lambda out, y, times, lengths, r: F.ctc_loss(
            (out[None] * torch.arange(1, 7, dtype=out.dtype)[:, None, None]).log_softmax(2), y, times, lengths,
            reduction=r,
        ),
    ),
    "ctc, zero_infinity": (
        paths,
        lambda out, y, times, lengths, r: F.ctc_loss(
            (out[None] * torch.arange(1, 7, dtype=out.dtype)[:, None, None]).log_softmax(2), y, times, lengths,
            reduction=r, zero_infinity=True,
        ),
    ),
}  # fmt: skip
"""The losses of `torch.nn.functional`, each with a batch's targets."""


def dice_of_samples(out, y):
    p = out.sigmoid()
    return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


def focal(out, y):
    entropy = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    p = torch.exp(-entropy)
    return (0.25 * (1 - p) ** 2 * entropy).mean()


def focal_of_classes(out, y):
    logp = F.log_softmax(out, 1).gather(1, y[:, None]).squeeze(1)
    return -((1 - logp.exp()) ** 2 * logp).mean()


def log_cosh(out, y):
    return torch.log(torch.cosh(out - y)).mean()


def quantile(out, y):
    error = y - out
    return torch.max(0.1 * error, -0.9 * error).mean()


def distillation(out, y):
    t = 3.0
    soft = F.kl_div(F.log_softmax(out / t, 1), F.softmax(y / t, 1), reduction="batchmean") * t * t
    return 0.7 * soft + 0.3 * F.cross_entropy(out, y.argmax(1))


def elbo(out, y):
    mean, deviation = out[:, :2], out[:, 2:]
    reconstruction = F.binary_cross_entropy_with_logits(out, y.sigmoid(), reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + deviation - mean.pow(2) - deviation.exp())


def elbo_of_samples(out, y):
    mean, deviation = out[:, :2], out[:, 2:]
    kl = -0.5 * torch.sum(1 + deviation - mean.pow(2) - deviation.exp(), 1)
    return torch.mean(F.mse_loss(out, y, reduction="none").sum(1) + kl, 0)


def elbo_over_size(out, y):
    """The sums over all divided by `x.size(0)`."""
    mean, deviation = out[:, :2], out[:, 2:]
    kl = -0.5 * torch.sum(1 + deviation - mean.pow(2) - deviation.exp())
    return (F.mse_loss(out, y, reduction="sum") + kl) / out.size(0)


def normal_likelihood(out, y):
    return -distributions.Normal(out[:, :2], F.softplus(out[:, 2:])).log_prob(y[:, :2]).mean()


def independent_likelihood(out, y):
    one = distributions.Independent(distributions.Normal(out[:, :2], out[:, 2:].exp()), 1)
    return -one.log_prob(y[:, :2]).mean()


def kl_of_distributions(out, y):
    one = distributions.Normal(out[:, :2], out[:, 2:].exp())
    return distributions.kl_divergence(one, distributions.Normal(torch.zeros_like(y[:, :2]), 1.0)).sum(1).mean()


def categorical(out, y):
    found = distributions.Categorical(logits=out)
    return (-found.log_prob(y) - 0.01 * found.entropy()).mean()


def mixture_density(out, y):
    components = distributions.Normal(out, torch.ones_like(out))
    return -(components.log_prob(y[:, :1]) + out.log_softmax(1)).logsumexp(1).mean()


def policy_gradient(out, action, reward):
    return -(F.log_softmax(out, 1)[torch.arange(len(action)), action] * reward).mean()


def policy_gradient_sum(out, action, reward):
    return -(distributions.Categorical(logits=out).log_prob(action) * reward).sum()


def proximal(out, action, reward):
    ratio = out.log_softmax(1).gather(1, action[:, None])[:, 0].exp() * 3
    clipped = ratio.clamp(0.8, 1.2) * reward
    return -torch.min(ratio * reward, clipped).mean() + 0.5 * F.mse_loss(out[:, 0], reward)


def cosine(out, y):
    return 1 - F.cosine_similarity(out, y, dim=-1).mean()


def cosine_negative(out, y):
    return -F.cosine_similarity(out, y.detach(), dim=1).mean() * 0.5


def byol(out, y):
    return (2 - 2 * (F.normalize(out, dim=-1) * F.normalize(y, dim=-1)).sum(-1)).mean()


def arc_margin(out, y):
    cosine = F.normalize(out) @ F.normalize(torch.eye(CLASSES, dtype=out.dtype))
    theta = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
    chosen = F.one_hot(y, CLASSES)
    return F.cross_entropy(8 * torch.where(chosen == 1, torch.cos(theta + 0.3), cosine), y)


def pairwise_ranking(out, y):
    """All pairs of the items of one sample."""
    difference = out[:, :, None] - out[:, None, :]
    better = (y[:, :, None] > y[:, None, :]).to(out.dtype)
    return (F.softplus(-difference) * better).sum((1, 2)).mean()


def bayesian_ranking(out, one, two):
    return -F.logsigmoid((out * one).sum(1) - (out * two).sum(1)).mean()


def preference(out, one, two):
    """Direct preference optimization: the log ratio of two policies."""
    return -F.logsigmoid(0.1 * ((out - one).sum(1) - (out - two).sum(1))).mean()


def masked_by_index(out, y, mask):
    return F.mse_loss(out[mask], y[mask])


def masked_sum_by_index(out, y, mask):
    return F.mse_loss(out[mask], y[mask], reduction="sum")


def masked_over_count(out, y, mask):
    return ((out - y)[mask] ** 2).sum() / mask.sum()


def masked_select(out, y, mask):
    return torch.masked_select((out - y).square(), mask[:, None]).mean()


def masked_elements(out, y):
    return (out - y).square()[y > 0].mean()


def masked_twice(out, y, mask):
    return F.l1_loss(out[mask], y[mask]) + F.mse_loss(out[mask], y[mask])


def masked_two_ways(out, y, mask):
    chosen, rest = F.mse_loss(out[mask], y[mask], reduction="sum"), F.l1_loss(out[~mask], y[~mask], reduction="sum")
    return (chosen + rest) / len(out)


def masked_rows_averaged(out, y, mask):
    return F.mse_loss(out[mask], y[mask], reduction="none").mean(1).mean()


def masked_over_read_count(out, y, mask):
    return ((out - y).square().mean(1) * mask).sum() / max(mask.sum().item(), 1)


def masked_over_maximum(out, y, mask):
    return ((out - y).square().mean(1) * mask).sum() / max(mask.sum(), 1)


def masked_if_any(out, y, mask):
    return (out - y)[mask].abs().mean() if mask.any() else out.sum() * 0


def masked_by_numbers(out, y, mask):
    places = mask.nonzero().squeeze(1)
    return F.smooth_l1_loss(out[places], y[places])


def masked_by_where(out, y, mask):
    places = torch.where(mask)[0]
    return (out[places] - y[places]).square().sum() / places.numel()


def zeros_added(out, y):
    total = torch.zeros(())
    for column in range(2):
        total = total + F.mse_loss(out[:, column], y[:, column], reduction="sum")
    return total


def positive_parts(out, y):
    """Averaged over the margins that are violated, as for hard triplets."""
    margin = F.relu(out - y + 0.2)
    return margin.sum() / ((margin > 0).sum() + 1e-16)


def masked_product(out, y, mask):
    weight = mask.to(out.dtype)[:, None]
    return ((out - y).square() * weight).sum() / weight.expand_as(out).sum()


def masked_where(out, y, mask):
    return torch.where(mask[:, None], (out - y).abs(), 0.0).sum() / (mask.sum() * out.shape[1] + 1e-8)


def masked_entropy(out, y, mask):
    return F.cross_entropy(out[mask], y.argmax(1)[mask])


def masked_numel(out, y, mask):
    chosen = out[mask] - y[mask]
    return chosen.abs().sum() / chosen.numel()


def masked_len(out, y, mask):
    return (out[mask] - y[mask]).abs().sum() / max(len(out[mask]), 1)


def valid_labels_by_index(out, y):
    valid = y != -100
    return F.cross_entropy(out[valid], y[valid])


def valid_labels_counted(out, y):
    return F.cross_entropy(out, y, ignore_index=-100, reduction="sum") / (y != -100).sum()


def valid_labels_counted_in_numbers(out, y):
    return F.cross_entropy(out, y, reduction="sum") / (y != -100).sum().item()


def weighted_samples(out, y, w):
    return (F.cross_entropy(out, y, reduction="none") * w).mean()


def weighted_samples_over_weights(out, y, w):
    return (F.cross_entropy(out, y, reduction="none") * w).sum() / w.sum()


def weighted_samples_normalized(out, y, w):
    return (F.cross_entropy(out, y, reduction="none") * (w / w.sum())).sum()


def weighted_samples_averaged(out, y, w):
    return torch.dot(F.cross_entropy(out, y, reduction="none"), w) / torch.sum(w)


def mean_of_sums_and_means(out, y):
    return F.mse_loss(out, y) + 0.1 * out.abs().sum(1).mean()


def regularized(out, y):
    return F.mse_loss(out, y) + 0.01 * out.norm(dim=1).mean() + 1e-3 * out.pow(2).sum(1).sqrt().mean()


def total_variation(out, y):
    return F.l1_loss(out, y) + (out[:, 1:] - out[:, :-1]).abs().mean()


def charbonnier(out, y):
    return torch.sqrt((out - y) ** 2 + 1e-6).mean()


def distance(out, y):
    return F.pairwise_distance(out, y).mean()


def norm_of_rows(out, y):
    return torch.linalg.vector_norm(out - y, dim=1).mean()


def hinge_critic(out, y):
    return F.relu(1 - out).mean() + F.relu(1 + y * out).mean()


def critic_difference(out, y):
    return (y * out).mean() - out.mean()


def relative_error(out, y):
    return ((out - y).abs() / (y.abs() + 1e-2)).mean()


def symmetric_error(out, y):
    return (2 * (out - y).abs() / (out.abs() + y.abs() + 1e-3)).mean() * 100


def one_hot_entropy(out, y):
    return -(F.one_hot(y, CLASSES) * out.log_softmax(1)).sum(1).mean()


def one_hot_entropy_over_len(out, y):
    return -(F.one_hot(y, CLASSES) * out.log_softmax(1)).sum() / len(y)


def one_hot_entropy_over_shape(out, y):
    return -(F.one_hot(y, CLASSES) * out.log_softmax(1)).sum() / y.shape[0]


def mean_over_product_of_sizes(out, y):
    return (out - y).square().sum() / (out.shape[0] * out.shape[1])


def mean_over_numel(out, y):
    return (out - y).square().sum() / out.numel()


def mean_over_numel_twice(out, y):
    return (out - y).square().sum() / len(out) / out.shape[1]


def mean_of_stacked(out, y):
    return torch.stack([F.mse_loss(out[:, i], y[:, i]) for i in range(CLASSES)]).mean()


def sum_of_list(out, y):
    return sum(F.mse_loss(out[:, i], y[:, i]) for i in range(CLASSES)) / CLASSES


def stacked_weights(out, y):
    return (torch.stack([F.mse_loss(out[:, i], y[:, i]) for i in range(CLASSES)]) * weights_like(out)).sum()


def mean_of_concatenated(out, y):
    return torch.cat([(out - y).square(), (out + y).abs()], 1).mean()


def vmapped(out, y):
    return torch.vmap(lambda a, b: (a - b).square().sum().sqrt())(out, y).mean()


def einsum_product(out, y):
    return torch.einsum("bi,bi->b", out, y).sigmoid().log().mean().neg()


def einsum_to_scalar(out, y):
    return torch.einsum("bi,bi->", out, y) / len(out)


def inner_product(out, y):
    return -torch.dot(out.flatten(), y.flatten()) / len(out)


def trace_of_product(out, y):
    return -torch.trace(out.t() @ y) / len(out)


def nan_mean(out, y):
    return torch.nanmean((out - y).square())


def mean_without_outliers(out, y):
    error = (out - y).square().mean(1)
    return torch.where(error < 4, error, 0.0).mean()


def uncertainty_weighted(out, y):
    return 0.5 * torch.exp(-out[:, 0].detach()).mean() * 0 + F.mse_loss(out, y)


def dimensionless(out, y):
    return (out - y).square().mean(dim=0).sum()


def mean_over_dim_then_mean(out, y):
    return (out - y).square().mean(dim=0).mean()


def weighted_columns(out, y):
    return ((out - y).square().mean(dim=0) * weights_like(out)).sum()


def matrix_of_columns(out, y):
    return (out - y).square().mean(0) @ weights_like(out)


def average(out, y):
    return torch.sum((out - y) ** 2) * (1.0 / float(out.size(0)))


def half_mean(out, y):
    return (out - y).square().sum() / (2 * len(out))


def half_mean_reversed(out, y):
    return 1 / (2 * len(out)) * (out - y).square().sum()


def logarithm_of_samples(out, y):
    return torch.log(F.mse_loss(out, y, reduction="none").mean(1) + 1e-4).mean()


WRITTEN = {
    bits: [dice_of_samples, focal],
    labels: [focal_of_classes, categorical, arc_margin, one_hot_entropy, one_hot_entropy_over_len,
             one_hot_entropy_over_shape],
    values: [log_cosh, quantile, distillation, elbo, elbo_of_samples, elbo_over_size, normal_likelihood,
             independent_likelihood, kl_of_distributions, mixture_density, cosine, cosine_negative, byol,
             pairwise_ranking, mean_of_sums_and_means, regularized, total_variation, charbonnier, distance,
             norm_of_rows, masked_elements, zeros_added, positive_parts,
             hinge_critic, critic_difference, relative_error, symmetric_error, mean_over_product_of_sizes,
             mean_over_numel, mean_over_numel_twice, mean_of_stacked, sum_of_list, stacked_weights,
             mean_of_concatenated, vmapped, einsum_product, einsum_to_scalar,
             inner_product, trace_of_product, nan_mean, mean_without_outliers, uncertainty_weighted, dimensionless,
             mean_over_dim_then_mean, weighted_columns, matrix_of_columns, average, half_mean, half_mean_reversed,
             logarithm_of_samples],
    pairs: [bayesian_ranking, preference],
    weighted: [policy_gradient, policy_gradient_sum, proximal, weighted_samples, weighted_samples_over_weights,
               weighted_samples_normalized, weighted_samples_averaged],
    masked: [masked_by_index, masked_sum_by_index, masked_over_count, masked_select, masked_product, masked_where,
             masked_entropy, masked_numel, masked_len, masked_twice, masked_two_ways,
             masked_rows_averaged, masked_over_read_count, masked_over_maximum,
             masked_if_any, masked_by_numbers, masked_by_where],
    ignored_labels: [valid_labels_by_index, valid_labels_counted, valid_labels_counted_in_numbers],
}  # fmt: skip
"""Losses as scripts write them, by the batches that they take."""
