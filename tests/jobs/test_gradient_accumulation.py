"""Several accumulated calls against one plain step on all their rows."""

import pytest
import torch
import torch.nn.functional as F
from accumulation_check import Script, assert_accumulated
from torch import nn

CLASSES = 4


def perceptron(loss, batch, *, rate=0.1):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return Script(modules={"model": model}, loss=lambda x, *rest: loss(model(x), *rest), batch=batch, rate=rate)


def labelled(rows):
    return torch.randn(rows, 5), torch.randint(0, CLASSES, (rows,))


def ignored(rows):
    x, labels = labelled(rows)
    return x, torch.where(torch.rand(rows) < 0.5, -100, labels)


def targets(rows):
    return torch.randn(rows, 5), torch.randn(rows, CLASSES)


def cross_entropy():
    return perceptron(F.cross_entropy, labelled)


def ignored_targets():
    return perceptron(F.cross_entropy, ignored)


def class_weights():
    weights = torch.tensor([0.1, 2.0, 0.5, 3.0])
    return perceptron(lambda out, y: F.cross_entropy(out, y, weight=weights), ignored)


def label_smoothing():
    return perceptron(lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), ignored)


def smoothing_and_class_weights():
    weights = torch.tensor([0.1, 2.0, 0.5, 3.0])
    return perceptron(lambda out, y: F.cross_entropy(out, y, weight=weights, label_smoothing=0.1), ignored)


def class_probabilities():
    return perceptron(lambda out, y: F.cross_entropy(out, y.softmax(1)), targets)


def mean_squares():
    return perceptron(F.mse_loss, targets)


def several_means():
    return perceptron(lambda out, y: F.mse_loss(out, y) + F.l1_loss(out, y) + out.square().mean(1).mean(), targets)


def divergence():
    return perceptron(lambda out, y: F.kl_div(out.log_softmax(1), y.softmax(1), reduction="batchmean"), targets)


def binary():
    return perceptron(lambda out, y: F.binary_cross_entropy_with_logits(out, y.sigmoid()), targets)


def loss_per_sample():
    return perceptron(lambda out, y: F.cross_entropy(out, y, reduction="none"), labelled)


def sum_over_rows():
    return perceptron(lambda out, y: F.cross_entropy(out, y, reduction="sum") / 10, labelled, rate=0.05)


def sum_over_their_number():
    return perceptron(lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(out), labelled)


def rows_over_their_number():
    return perceptron(lambda out, y: ((out - y).square().sum(1) / out.shape[0] * 2).sum(), targets)


def times_the_inverse_of_the_number():
    return perceptron(lambda out, y: (out - y).square().sum() * (1 / len(out)), targets)


def number_as_a_tensor():
    return perceptron(lambda out, y: (out - y).square().sum() / torch.tensor(len(out)), targets)


def ones_counted():
    return perceptron(lambda out, y: (out - y).square().sum() / torch.ones(len(out)).sum(), targets)


def masked_mean():
    def loss(out, y):
        mask = (y[:, 0] > 0.3).to(out.dtype)
        return ((out - y).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)

    return perceptron(loss, targets)


def masked_mean_with_epsilon():
    def loss(out, y):
        mask = y > 0.3
        return ((out - y).square() * mask).sum() / (mask.sum() + 1e-3)

    return perceptron(loss, targets)


def weighted_mean():
    def batch(rows):
        return (*targets(rows), torch.rand(rows))

    return perceptron(lambda out, y, w: ((out - y).square().sum(1) * w).sum() / w.sum(), batch)


def penalty_on_weights():
    script = cross_entropy()
    model = script.modules["model"]

    def loss(x, y):
        return F.cross_entropy(model(x), y) + 0.01 * sum(item.square().sum() for item in model.parameters()) + 1.0

    return Script(modules=script.modules, loss=loss, batch=labelled)


def temperature():
    model = nn.Linear(5, CLASSES)
    model.register_parameter("scale", nn.Parameter(torch.tensor(0.3)))
    return Script(
        modules={"model": model}, loss=lambda x, y: F.cross_entropy(model(x), y) * model.scale.exp(), batch=ignored
    )


def tokens():
    """A language model with ignored targets: scores (rows, length, classes)."""
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 11)
    )

    def batch(rows):
        ids = torch.randint(0, 11, (rows, 6))
        return ids, torch.where(torch.rand(rows, 6) < 0.3, -100, ids)

    def loss(ids, wanted):
        return F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())

    return Script(modules={"model": model}, loss=loss, batch=batch)


def tokens_class_first():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def batch(rows):
        ids = torch.randint(0, 11, (rows, 6))
        return ids, torch.where(torch.rand(rows, 6) < 0.3, -100, ids)

    weights = torch.rand(11)

    def loss(ids, wanted):
        return F.cross_entropy(model(ids).transpose(1, 2), wanted, weight=weights, label_smoothing=0.1)

    return Script(modules={"model": model}, loss=loss, batch=batch)


def scores_of_labels():
    """The scores of the labels, each row selected by its number."""

    def loss(scores, labels):
        return -scores.log_softmax(1)[torch.arange(len(labels)), labels].mean()

    return perceptron(loss, labelled)


def rows_selected_by_number():
    """Rows that a value of the batch has anyway, by their numbers, as the masks of transformers do."""

    def loss(scores, labels):
        numbers = torch.arange(0, len(scores), 1)[:, None].expand(-1, 3)
        chosen = scores[numbers, torch.arange(3)[None]]
        weight = torch.ones(len(scores), 2)[torch.arange(len(scores))][:, 0] + chosen.sum(1).tanh()
        return (F.cross_entropy(scores, labels, reduction="none") * weight).mean()

    return perceptron(loss, labelled)


def class_token():
    """One learned token expanded over the batch, as in a vision transformer."""
    layer = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
    layer.register_parameter("token", nn.Parameter(torch.randn(1, 1, 5)))
    head = nn.Linear(5, CLASSES)

    def loss(x, y):
        sequence = torch.cat([layer.token.expand(len(x), -1, -1), x.unsqueeze(1)], 1)
        return F.cross_entropy(head(layer(sequence)[:, 0]), y)

    return Script(modules={"layer": layer, "head": head}, loss=loss, batch=labelled)


def recurrent():
    lstm, head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, CLASSES)

    def loss(x, y):
        start = torch.zeros(1, len(x), 6)
        return F.cross_entropy(head(lstm(x, (start, start))[0][:, -1]), y)

    return Script(
        modules={"lstm": lstm, "head": head},
        loss=loss,
        batch=lambda rows: (torch.randn(rows, 4, 3), torch.randint(0, CLASSES, (rows,))),
    )


def critic():
    """A GAN's critic with targets created in the job."""
    model = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def loss(real, fake):
        yes, no = torch.ones(len(real), 1), torch.zeros(len(fake), 1)
        return F.binary_cross_entropy_with_logits(model(real), yes) + F.binary_cross_entropy_with_logits(
            model(fake), no
        )

    return Script(modules={"model": model}, loss=loss, batch=lambda rows: (torch.randn(rows, 5), torch.randn(rows, 5)))


def gradient_penalty():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(x):
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + ((slope.norm(dim=1) - 1) ** 2).mean()

    return Script(modules={"model": model}, loss=loss, batch=lambda rows: (torch.randn(rows, 5),), rate=0.05)


def valid_targets_and_rows():
    """Two weights that are equal as long as no target is ignored."""

    def loss(out, y):
        return F.cross_entropy(out, y) + 0.1 * out.square().mean()

    return perceptron(loss, labelled)


def convolution():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, CLASSES))
    return Script(
        modules={"model": model},
        loss=lambda x, y: {"loss": F.cross_entropy(model(x), y), "rows": len(x)}["loss"],
        batch=lambda rows: (torch.randn(rows, 1, 8, 8), torch.randint(0, CLASSES, (rows,))),
    )


BUILDS = [
    cross_entropy, ignored_targets, class_weights, label_smoothing, smoothing_and_class_weights, class_probabilities,
    mean_squares, several_means, divergence, binary, loss_per_sample, sum_over_rows, sum_over_their_number,
    rows_over_their_number, times_the_inverse_of_the_number, number_as_a_tensor, ones_counted,
    masked_mean, masked_mean_with_epsilon, weighted_mean, penalty_on_weights, temperature, tokens, tokens_class_first,
    scores_of_labels, rows_selected_by_number,
    class_token, recurrent, critic, gradient_penalty, convolution,
    valid_targets_and_rows,
]  # fmt: skip


OFTEN = ("cross_entropy", "smoothing_and_class_weights", "masked_mean", "penalty_on_weights", "tokens", "critic")
"""Scripts that always run on one device and on workers; others run in a sample."""


def sample_cases(*workers):
    """Return every script with one number of workers; all other combinations are `exhaustive`."""
    found = []
    for place, build in enumerate(BUILDS):
        for turn, size in enumerate(workers):
            always = build.__name__ in OFTEN if size > 1 else build.__name__ in OFTEN or place % 3 == 0
            one_of = size == 1 or place % (len(workers)) == turn
            marks = [pytest.mark.slow] if always and one_of else [pytest.mark.exhaustive]
            found.append(pytest.param(build, size, marks=marks, id=f"{build.__name__}, {size} workers"))
    return found


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("build", "workers"), sample_cases(1))
def test_on_one_device_accumulated_calls_equal_one_call_on_all_rows(build, workers):
    assert_accumulated(build, workers, torch.float64)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("build", "workers"), sample_cases(2, 3))
def test_on_workers_accumulated_calls_equal_one_call_on_all_rows(build, workers):
    assert_accumulated(build, workers, torch.float64)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("build", "workers"), [(masked_mean, 3), (cross_entropy, 1), (ignored_targets, 2)])
def test_accumulated_calls_equal_one_call_in_float32(build, workers):
    assert_accumulated(build, workers, torch.float32)


def batch_norm():
    """Each call has its own statistics, in training and in the running averages."""
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    def together(group):
        return sum(loss(x, y) * len(x) for x, y in group) / sum(len(x) for x, _ in group)

    return Script(modules={"model": model}, loss=loss, batch=labelled, together=together)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("workers", [3, 1, 2])
def test_batch_norm_uses_the_statistics_of_each_call(workers):
    assert_accumulated(batch_norm, workers, torch.float64, ((7, 5, 7), (6, 4)))


def dropout():
    """Each call draws its own mask, as in a plain script that calls backward for each."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Linear(8, CLASSES))

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    def together(group):
        return sum(loss(x, y) * len(x) for x, y in group) / sum(len(x) for x, _ in group)

    return Script(modules={"model": model}, loss=loss, batch=labelled, together=together)


@pytest.mark.parametrize("workers", [1, 2])
def test_dropout_draws_as_in_the_plain_script_for_each_call(workers):
    assert_accumulated(dropout, workers, torch.float64, ((7, 5, 7), (6, 4)))
