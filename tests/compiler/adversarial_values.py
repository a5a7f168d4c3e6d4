"""Adversarial cases with values: reading a tensor's numbers, random numbers, changed arguments, precision, results."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron, rows
from torch import nn


def plain():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def branch_on_a_value():
    model = perceptron()

    def loss(features, labels):
        scores = model(features)
        if scores.sum() > 0:  # the line
            scores = scores * 2
        return F.cross_entropy(scores, labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def item_of_a_tensor():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * labels.sum().item()  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def float_of_a_tensor():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * float(labels.sum())  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def list_of_a_tensor():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * labels.tolist()[0]  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def numpy_of_a_tensor():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * float(features.numpy().sum())  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def item_of_a_tensor_of_the_closure():
    model, scale = perceptron(), torch.tensor(1.0)

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * scale.item()  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def value_of_a_parameter():
    model = perceptron()

    def loss(features, labels):
        factor = float(model[0].weight.detach().sum())  # the line
        return F.cross_entropy(model(features), labels) * factor

    return Script(function=loss, modules={"model": model}, batches=batches())


def shape_that_depends_on_values():
    model = perceptron()

    def loss(features, labels):
        chosen = labels > 0
        scores = model(features)[chosen]  # the line
        return F.cross_entropy(scores, labels[chosen])

    return Script(function=loss, modules={"model": model}, batches=batches())


def count_of_nonzero_places():
    model = perceptron()

    def loss(features, labels):
        places = torch.nonzero(labels)  # the line
        return model(features).sum() + places.shape[0]

    return Script(function=loss, modules={"model": model}, batches=batches())


def ctc_loss_with_tensor_lengths():
    model = perceptron()

    def loss(features, labels, input_lengths, label_lengths):
        scores = model(features).log_softmax(-1)
        return F.ctc_loss(scores, labels, input_lengths, label_lengths)

    def sequences():
        return (
            torch.randn(7, 3, 6).double(),
            torch.randint(1, 4, (3, 2)),
            torch.tensor([7, 5, 6]),
            torch.tensor([2, 1, 2]),
        )

    return Script(function=loss, modules={"model": model}, batches=batches(sequences))


def print_of_the_loss():
    model = perceptron()

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        print("loss", value)  # the line
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def loss_formatted_as_text():
    model, texts = perceptron(), {}

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        texts["loss"] = f"{value}"  # the line
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def argument_changed_in_place():
    model = perceptron()

    def loss(features, labels):
        features.mul_(2)  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def random_numbers_inside():
    model = perceptron()

    def loss(features, labels):
        noisy = features + 0.1 * torch.randn_like(features)
        return F.cross_entropy(model(noisy), labels) + torch.rand(())

    return Script(function=loss, modules={"model": model}, batches=batches())


def seed_set_inside():
    model = perceptron()

    def loss(features, labels):  # the line
        torch.manual_seed(3)
        return F.cross_entropy(model(F.dropout(features, 0.5)), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def autocast_inside():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(features, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(features.unsqueeze(1)).squeeze(1), labels)

    return Script(function=loss, modules={"model": model}, batches=batches(lambda: rows(dtype=torch.float32)))


def metrics_beside_the_loss():
    model = perceptron()

    def loss(features, labels):
        scores = model(features)
        return F.cross_entropy(scores, labels), (scores.argmax(1) == labels).sum(), scores, "text"

    return Script(function=loss, modules={"model": model}, batches=batches())


def loss_per_sample():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels, reduction="none")

    return Script(function=loss, modules={"model": model}, batches=batches())


def script_of_scores(score):
    """Return a script whose loss is the cross entropy of a perceptron plus `score(scores, features)`."""
    model = perceptron()

    def loss(features, labels):
        scores = model(features)
        return F.cross_entropy(scores, labels) + score(scores, features)

    return Script(function=loss, modules={"model": model}, batches=batches())


def labels_that_end_early():
    labels = torch.tensor([[0, 2, -1, -1], [1, -1, -1, -1], [3, 0, 1, -1], [2, 1, 0, 3], [-1, -1, 0, 2]])
    return script_of_scores(lambda scores, _: F.multilabel_margin_loss(scores, labels))


def labels_that_end_early_summed_by_a_module():
    labels = torch.tensor([[0, 2, -1, 1], [-1, 1, 2, 3], [3, 3, 1, -1], [2, -1, 0, 3], [1, 0, -1, 2]])
    return script_of_scores(lambda scores, _: nn.MultiLabelMarginLoss(reduction="sum")(scores, labels))


def sum_of_booleans_as_a_boolean():
    def score(scores, features):
        return scores.mean() * (features > 0).sum(dtype=torch.bool) + (features > 1).sum(0, dtype=torch.bool).sum()

    return script_of_scores(score)


def variance_of_complex_numbers():
    return script_of_scores(lambda scores, _: torch.fft.fft(scores).var())


def deviations_of_complex_numbers():
    def score(scores, _):
        spectrum = torch.fft.fft(scores)
        return spectrum.std(0).sum() + spectrum.var(1, unbiased=False, keepdim=True).sum()

    return script_of_scores(score)


def list_of_a_tensor_of_the_closure():
    model, weights = perceptron(), torch.tensor([1.0, 2.0])

    def loss(features, labels):
        first, second = weights.tolist()  # the line
        return F.cross_entropy(model(features), labels) * first + second

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=lambda _: weights.mul_(3))


def forked_generator():
    model = perceptron()

    def loss(features, labels):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn_like(features)
        return F.cross_entropy(model(features + noise), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def generator_set_back():
    model = perceptron()

    def loss(features, labels):
        state = torch.get_rng_state()  # the line
        noise = torch.randn_like(features)
        torch.set_rng_state(state)
        return F.cross_entropy(model(features + noise), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


OF_A_GENERATOR = r"reads or sets the state of a generator"

CASES = [
    AdversarialCase(build=labels_that_end_early),
    AdversarialCase(build=labels_that_end_early_summed_by_a_module),
    AdversarialCase(build=sum_of_booleans_as_a_boolean),
    AdversarialCase(build=variance_of_complex_numbers),
    AdversarialCase(build=deviations_of_complex_numbers),
    AdversarialCase(build=list_of_a_tensor_of_the_closure, refused=r"turned into a list of numbers"),
    AdversarialCase(build=forked_generator),
    AdversarialCase(build=generator_set_back, refused=OF_A_GENERATOR),
    AdversarialCase(build=plain),
    AdversarialCase(build=branch_on_a_value, reads_values=True),
    AdversarialCase(build=item_of_a_tensor, reads_values=True),
    AdversarialCase(build=float_of_a_tensor, reads_values=True),
    AdversarialCase(build=list_of_a_tensor, reads_values=True),
    AdversarialCase(build=numpy_of_a_tensor, refused=r"a tensor turned into a NumPy array"),
    AdversarialCase(build=item_of_a_tensor_of_the_closure, reads_values=True),
    AdversarialCase(build=value_of_a_parameter, reads_values=True),
    AdversarialCase(build=shape_that_depends_on_values),
    AdversarialCase(build=count_of_nonzero_places),
    AdversarialCase(build=ctc_loss_with_tensor_lengths),
    AdversarialCase(build=print_of_the_loss, refused=r"print of a tensor|formatted as text"),
    AdversarialCase(build=loss_formatted_as_text, refused=r"a tensor formatted as text"),
    AdversarialCase(build=argument_changed_in_place, refused=r"tensor argument 0 is changed in place"),
    AdversarialCase(build=random_numbers_inside),
    AdversarialCase(build=seed_set_inside, refused=r"seeds torch's generator"),
    AdversarialCase(build=autocast_inside, tolerance=1e-5),
    AdversarialCase(build=metrics_beside_the_loss),
    AdversarialCase(build=loss_per_sample),
]
