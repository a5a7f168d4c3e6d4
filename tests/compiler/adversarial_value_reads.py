"""Adversarial cases of jobs whose Python reads values of tensors: branches, loops, numbers, PyTorch's checks."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn


def script_of_values(score, count=6):
    """Return a script whose loss is a perceptron's, changed by a function that reads values of tensors."""
    model = perceptron()

    def loss(features, labels):
        scores = model(features)
        return score(F.cross_entropy(scores, labels), scores, features, labels)

    return Script(function=loss, modules={"model": model}, batches=batches(count=count))


def branch_on_the_loss():
    return script_of_values(lambda loss, *_: loss * 2 if loss > 1.4 else loss)


def branches_on_single_rows():
    def score(loss, _, features, __):
        return loss * (2 if features[0, 0] > 0 else 1) * (3 if features[-1, 1] > 0 else 1)

    return script_of_values(score)


def number_that_changes_at_every_call():
    return script_of_values(lambda loss, _, features, __: loss * (1 + features.max().item()))


def slice_as_long_as_the_labels():
    def score(loss, scores, _, labels):
        return loss + F.cross_entropy(scores[:, : labels.max() + 1], labels)

    return script_of_values(score)


def loop_until_small():
    def score(loss, scores, *_):
        while scores.norm() > 0.5:
            scores = scores / 2
        return loss + scores.sum()

    return script_of_values(score)


def loop_over_a_number():
    def score(loss, scores, features, labels):
        return loss + sum(features[:, place].mean() for place in range(int(labels.max()))) * scores.mean()

    return script_of_values(score)


def branch_between_random_numbers():
    def score(loss, scores, *_):
        noise = F.dropout(scores, 0.5)
        if noise.sum() > 0:
            noise = noise + torch.randn_like(noise)
        return loss + F.dropout(noise, 0.3).square().mean()

    return script_of_values(score)


def branch_raised_and_caught():
    def score(loss, _, features, __):
        try:
            if features[0, 0] > 0:
                raise ValueError
        except Exception:
            return loss * 2
        return loss

    return script_of_values(score)


def branch_on_a_gradient():
    def score(loss, scores, *_):
        (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
        return loss + gradient.square().sum() if gradient.norm() > 0.3 else loss

    return script_of_values(score)


def tensors_compared():
    def score(loss, _, features, labels):
        assert torch.allclose(features, features + 1e-12)
        assert not torch.equal(features, features + 1)
        return loss * (2 if torch.equal(labels, labels.sort().values) else 1)

    return script_of_values(score)


def statistics_of_torch_that_check():
    def score(loss, scores, *_):
        return loss + torch.cov(scores.t()).sum() + torch.corrcoef(scores.t()).square().sum()

    return script_of_values(score)


def distributions_that_check():
    def score(loss, scores, _, labels):
        normal = torch.distributions.Normal(scores[:, 0], scores[:, 1].exp())
        prior = torch.distributions.Normal(torch.zeros(5).double(), torch.ones(5).double())
        chosen = torch.distributions.Categorical(logits=scores)
        flags = torch.distributions.Bernoulli(logits=scores[:, 2])
        return (
            loss
            + torch.distributions.kl_divergence(normal, prior).mean()
            - chosen.log_prob(labels).mean()
            - flags.log_prob((labels > 1).double()).mean()
            + normal.rsample().square().mean()
            - 0.01 * chosen.entropy().mean()
        )

    return script_of_values(score)


def gaussian_loss_that_checks():
    return script_of_values(
        lambda loss, scores, features, _: loss + F.gaussian_nll_loss(scores[:, 0], features[:, 0], scores[:, 1].exp())
    )


def batch_norm_of_all_batches():
    # Without a bias, whose gradient before batch norm is only rounding.
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4, momentum=None)).double()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def linear_systems():
    weights = torch.eye(6).double() * 3

    def score(loss, scores, features, _):
        square = features.t() @ features + weights
        each = features.unsqueeze(2) * features.unsqueeze(1) + weights
        return (
            loss
            + torch.linalg.solve(square, features.t()).mean() * scores.mean()
            + torch.linalg.cholesky(each).diagonal(dim1=1, dim2=2).log().sum() * scores.sum()
            + torch.linalg.inv(each + scores.mean()).mean()
            + torch.linalg.inv(square.t()).sum()
        )

    return script_of_values(score)


def value_read_in_backward():
    model = perceptron()

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            ctx.save_for_backward(scores)
            return scores / 2

        @staticmethod
        def backward(ctx, grad):
            (scores,) = ctx.saved_tensors
            return grad / 2 if scores.sum() > 0 else grad  # the line

    def loss(features, labels):
        return F.cross_entropy(Halved.apply(model(features)), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


READ = (
    branch_on_the_loss,
    branches_on_single_rows,
    number_that_changes_at_every_call,
    slice_as_long_as_the_labels,
    loop_until_small,
    loop_over_a_number,
    branch_between_random_numbers,
    branch_raised_and_caught,
    branch_on_a_gradient,
    tensors_compared,
    statistics_of_torch_that_check,
    distributions_that_check,
    gaussian_loss_that_checks,
    batch_norm_of_all_batches,
    linear_systems,
)


def generator_before_a_value_that_is_read():
    """A value that is not the one captured for starts the call again: the generator must not have moved."""
    model, generator = perceptron(), torch.Generator(torch.get_default_device()).manual_seed(5)

    def loss(features, labels):
        noise = torch.rand(6, generator=generator, dtype=features.dtype)
        output = model(features * noise)
        if noise.sum() > 3:
            output = output * 2
        later = torch.rand(4, generator=generator, dtype=features.dtype)
        return F.cross_entropy(output * later, labels)

    return Script(function=loss, modules={"model": model}, batches=batches(count=6))


CASES = [
    AdversarialCase(build=generator_before_a_value_that_is_read, reads_values=True),
    *(AdversarialCase(build=build, reads_values=True) for build in READ),
    AdversarialCase(build=value_read_in_backward, refused=r"read in the backward pass"),
]
