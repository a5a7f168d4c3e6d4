"""Losses and batches on real workers against the plain script."""

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, sample_cases
from torch import nn

CLASSES = 4


def perceptron(loss, *, rate=0.1):
    """Return a script with a job that minimizes `loss(model(x), *rest of the batch)`."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    step = Step(function=lambda x, *rest: loss(model(x), *rest), optimizer=optimizer)
    return Script(modules={"model": model}, steps=[step])


def labelled(rows):
    return torch.randn(rows, 5), torch.randint(0, CLASSES, (rows,))


def labelled_with_ignored(rows):
    images, labels = labelled(rows)
    return images, torch.where(torch.rand(rows) < 0.4, -100, labels).index_fill(0, torch.tensor([0]), 1)


def labelled_on_the_first_rank_alone(rows):
    images, labels = labelled(rows)
    labels[max(1, rows // 4) :] = -100
    return images, labels


def labelled_with_none_valid(rows):
    images, labels = labelled(rows)
    return images, torch.full_like(labels, -100)


def regression(rows):
    return torch.randn(rows, 5), torch.randn(rows, CLASSES)


def in_numpy(rows):
    return tuple(item.numpy() for item in labelled(rows))


def by_name(rows):
    images, labels = labelled(rows)
    return {"batch": {"images": images, "labels": labels}, "scale": 0.5, "weights": (torch.rand(rows), None)}


def cross_entropy():
    return perceptron(F.cross_entropy)


def class_weights():
    weights = torch.tensor([0.1, 2.0, 0.5, 3.0])
    return perceptron(lambda out, labels: F.cross_entropy(out, labels, weight=weights))


def label_smoothing():
    return perceptron(nn.CrossEntropyLoss(label_smoothing=0.1))


def weights_ignored_and_smoothing():
    weights = torch.tensor([0.1, 2.0, 0.5, 3.0])
    return perceptron(lambda out, labels: F.cross_entropy(out, labels, weight=weights, label_smoothing=0.2))


def sum_of_losses():
    return perceptron(lambda out, labels: F.cross_entropy(out, labels, reduction="sum") / 10)


def class_probabilities():
    return perceptron(lambda out, target: F.cross_entropy(out, target.softmax(1)))


def loss_per_sample():
    return perceptron(lambda out, labels: F.cross_entropy(out, labels, reduction="none"))


def masked_loss_per_sample():
    return perceptron(lambda out, labels: F.cross_entropy(out, labels, reduction="none") * (labels > 0))


def loss_with_metrics():
    def loss(out, labels):
        hits = out.argmax(1) == labels
        return F.cross_entropy(out, labels), {"accuracy": hits.to(out.dtype).mean(), "hits": hits, "rows": len(out)}

    return perceptron(loss)


def loss_in_a_dict():
    return perceptron(lambda out, labels: {"loss": F.cross_entropy(out, labels), "out": out, "note": "a dict"})


def contrastive():
    towers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(4, 6)])
    scale = nn.Parameter(torch.tensor(0.0))
    towers.register_parameter("scale", scale)
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)

    def loss(left, right):
        one, other = (F.normalize(tower(side)) for tower, side in zip(towers, (left, right), strict=True))
        likeness = towers.scale.exp() * one @ other.t()
        targets = torch.arange(len(left))
        return (F.cross_entropy(likeness, targets) + F.cross_entropy(likeness.t(), targets)) / 2

    return Script(modules={"towers": towers}, steps=[Step(function=loss, optimizer=optimizer)])


def mean_squares():
    return perceptron(F.mse_loss)


def mean_absolutes():
    return perceptron(F.l1_loss)


def smooth_absolutes():
    return perceptron(lambda out, target: F.smooth_l1_loss(out, target) + F.huber_loss(out, target, delta=0.5))


def binary_cross_entropy():
    def loss(out, target):
        chances = target.sigmoid()
        weighted = F.binary_cross_entropy_with_logits(out, chances, pos_weight=torch.arange(1, CLASSES + 1))
        return F.binary_cross_entropy(out.sigmoid(), chances) + weighted

    return perceptron(loss)


def divergence():
    def loss(out, target):
        chances = target.softmax(1)
        return F.kl_div(out.log_softmax(1), chances, reduction="batchmean") + F.kl_div(out.log_softmax(1), chances)

    return perceptron(loss)


def statistics_over_the_batch():
    def loss(out, target):
        spread = out.std(0).sum() + out.var(dim=0, unbiased=False).mean() + out.var()
        length = out.norm() + torch.linalg.vector_norm(out, ord=3, dim=0).sum()
        return F.mse_loss(out, target) + spread + length + out.max() - out.amin(0).sum() + out.logsumexp(0).mean()

    # Unbounded below, so a larger rate would make plain scripts differ from themselves.
    return perceptron(loss, rate=0.01)


def rows_by_index():
    def loss(out, labels):
        chosen = out.gather(1, labels[:, None]).squeeze(1)
        scattered = torch.zeros_like(out).scatter(1, labels[:, None], chosen[:, None])
        counts = torch.zeros(CLASSES, dtype=out.dtype).index_add(0, labels, chosen)
        turned = out.flip(0)[torch.arange(len(out)) // 2]
        return chosen.square().mean() + scattered.square().sum() + counts.square().sum() + (turned * out).mean()

    return perceptron(loss, rate=0.001)


def gradient_penalty():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(x, _):
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + ((slope.norm(dim=1) - 1) ** 2).mean()

    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def nested_keyword_arguments():
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(*, batch, scale, weights):
        each = F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")
        return (each * weights[0]).sum() * scale

    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


LONG = (101,) * 17 + (40, 2, 101)
SCENARIOS = [
    Scenario(build=cross_entropy, batch=labelled, rows=LONG, name="batches of 101, a short one and one of 2"),
    Scenario(build=cross_entropy, batch=labelled),
    Scenario(build=cross_entropy, batch=labelled_with_ignored, name="ignored targets"),
    Scenario(build=cross_entropy, batch=labelled_on_the_first_rank_alone, name="shards all ignored"),
    Scenario(build=cross_entropy, batch=labelled_with_none_valid, rows=(7,) * 20, name="batches all ignored"),
    Scenario(build=class_weights, batch=labelled),
    Scenario(build=class_weights, batch=labelled_with_ignored, rows=(7,) * 20, name="class weights and ignored"),
    Scenario(build=label_smoothing, batch=labelled),
    Scenario(build=weights_ignored_and_smoothing, batch=labelled_with_ignored),
    Scenario(build=sum_of_losses, batch=labelled),
    Scenario(build=class_probabilities, batch=regression),
    Scenario(build=loss_per_sample, batch=labelled),
    Scenario(build=masked_loss_per_sample, batch=labelled),
    Scenario(build=loss_with_metrics, batch=labelled),
    Scenario(build=loss_in_a_dict, batch=labelled),
    Scenario(build=contrastive, batch=regression),
    Scenario(build=mean_squares, batch=regression),
    Scenario(build=mean_absolutes, batch=regression),
    Scenario(build=smooth_absolutes, batch=regression),
    Scenario(build=binary_cross_entropy, batch=regression),
    Scenario(build=divergence, batch=regression),
    Scenario(build=statistics_over_the_batch, batch=regression, rows=(7,) * 10 + (5,) * 10),
    Scenario(build=rows_by_index, batch=labelled),
    Scenario(build=gradient_penalty, batch=regression),
    Scenario(build=nested_keyword_arguments, batch=by_name),
    Scenario(build=cross_entropy, batch=in_numpy, name="arguments from NumPy"),
]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sample_cases(SCENARIOS))
def test_losses_gradients_and_parameters_equal_the_plain_scripts(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)
