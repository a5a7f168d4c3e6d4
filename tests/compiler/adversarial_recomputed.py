"""Adversarial cases with weights that a hook computes before each forward, and with operators that write diagonals."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm


def layers(change) -> nn.Sequential:
    """Return a small model whose layers `change` has changed."""
    return nn.Sequential(change(nn.Linear(6, 8)), nn.Tanh(), change(nn.Linear(8, 4))).double()


def script_of(model: nn.Module, before_call=lambda _: None) -> Script:
    def loss(features, labels):
        return F.cross_entropy(model(features), labels), model[0].weight.square().sum()

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=before_call)


def weights_of_a_direction_and_a_length():
    return script_of(layers(weight_norm))


def weights_of_spectral_norm():
    return script_of(layers(spectral_norm))


def weights_of_spectral_norm_in_eval_mode():
    return script_of(layers(spectral_norm).eval())


def pruned_weights():
    def change(layer):
        return prune.l1_unstructured(layer, "weight", 0.5)

    return script_of(layers(change))


def pruned_and_evaluated_outside_the_job():
    model = layers(lambda layer: prune.random_unstructured(weight_norm(layer, "bias", dim=None), "weight", 0.3))
    features = torch.randn(3, 6, dtype=torch.float64)
    return script_of(model, before_call=lambda _: model(features))


def one_weight_normed_twice_in_a_call():
    model = layers(spectral_norm)

    def loss(features, labels):
        return F.cross_entropy(model(features) + model(-features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def similarities_without_their_diagonal():
    model = layers(lambda layer: layer)

    def loss(features, labels):
        scores = model(features)
        similarities = (scores @ scores.t()).fill_diagonal_(-9.0)
        tall = torch.cat([scores, scores, scores]).fill_diagonal_(0.5, wrap=True)
        cube = (scores[:, :, None] * scores[:, None, :]).mean(0).expand(4, 4, 4).clone().fill_diagonal_(2)
        return F.cross_entropy(scores, labels) + similarities.logsumexp(1).mean() + tall.square().mean() + cube.mean()

    return Script(function=loss, modules={"model": model}, batches=batches())


def random_integers_between_limits():
    model = layers(lambda layer: layer)

    def loss(features, labels):
        factors = torch.empty_like(features).random_(2, 7)
        picked = torch.empty(3, dtype=torch.int64).random_(-2, 4)
        return F.cross_entropy(model(features * factors), labels) * picked.sum()

    return Script(function=loss, modules={"model": model}, batches=batches())


CASES = [
    AdversarialCase(build=weights_of_a_direction_and_a_length),
    AdversarialCase(build=weights_of_spectral_norm),
    AdversarialCase(build=weights_of_spectral_norm_in_eval_mode),
    AdversarialCase(build=pruned_weights),
    AdversarialCase(build=pruned_and_evaluated_outside_the_job),
    AdversarialCase(build=one_weight_normed_twice_in_a_call),
    AdversarialCase(build=similarities_without_their_diagonal),
    AdversarialCase(build=random_integers_between_limits),
]
