"""Adversarial cases with the layout and the sharing of memory: strides, gradients that are kept, transposed draws."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron, rows
from torch import nn


def parameter_that_is_only_summed():
    model = perceptron()
    scale = nn.ParameterDict({"weight": nn.Parameter(torch.randn(3, 4).double())})

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) + scale["weight"].sum()

    return Script(function=loss, modules={"model": model, "scale": scale}, batches=batches())


def parameters_with_one_gradient():
    model = perceptron()
    tables = nn.ParameterDict({name: nn.Parameter(torch.randn(4).double()) for name in ("one", "other")})

    def loss(features, labels):
        return F.cross_entropy(model(features) + tables["one"] + tables["other"], labels)

    def change(number):
        if number:
            tables["one"].grad.mul_(2)  # must not change the other's
            with torch.no_grad():
                tables["one"].add_(tables["other"].grad)

    return Script(function=loss, modules={"model": model, "tables": tables}, batches=batches(), before_call=change)


def gradients_kept():
    model, kept = perceptron(), []

    def change(number):
        if number:
            kept.append(model[0].bias.grad)
            with torch.no_grad():
                model[0].bias.add_(sum(kept))

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches(count=4), before_call=change)


def views_of_gradients_kept():
    model, kept = perceptron(), []

    def change(number):
        if number:
            kept.append(model[0].weight.grad[0])
            with torch.no_grad():
                model[0].bias[:6].add_(sum(kept))

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches(count=4), before_call=change)


def gradient_that_is_a_result():
    model = perceptron()

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        (gradient,) = torch.autograd.grad(value, [model[2].bias], create_graph=True)
        return value, gradient

    return Script(function=loss, modules={"model": model}, batches=batches())


def transposed_parameter():
    model = nn.Linear(6, 4).double()
    model.weight = nn.Parameter(torch.randn(6, 4).double().t())

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def pictures():
    return torch.randn(5, 3, 6, 6).double(), torch.randint(0, 4, (5,))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(4, 2, 3),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).double()


def script_of_pictures(model, before_call=lambda _: None, make=pictures):
    def loss(images, labels):
        scores = model(images)
        return F.cross_entropy(scores, labels), model[:3](images)

    return Script(function=loss, modules={"model": model}, batches=batches(make), before_call=before_call)


def channels_last_model():
    return script_of_pictures(convolutions().to(memory_format=torch.channels_last))


def channels_last_pictures():
    def make():
        images, labels = pictures()
        return images.to(memory_format=torch.channels_last), labels

    return script_of_pictures(convolutions(), make=make)


def channels_last_from_the_second_call_on():
    model = convolutions()

    def change(number):
        if number == 1:
            model.to(memory_format=torch.channels_last)

    return script_of_pictures(model, change)


def channels_last_model_pooled_to_one_pixel():
    # The picture that is enlarged from one pixel is channels_last too, and dropout draws in the order of its memory.
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Upsample(size=(3, 2)),
        nn.Dropout(0.4),
        nn.AdaptiveAvgPool2d((2, 1)),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return script_of_pictures(model.double().to(memory_format=torch.channels_last))


def channels_last_volumes_pooled_to_one_point():
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Upsample(size=(2, 3, 2)), nn.Dropout(0.4), nn.Flatten()
    )
    model = nn.Sequential(*model, nn.Linear(48, 4)).double().to(memory_format=torch.channels_last_3d)

    def make():
        return torch.randn(5, 2, 4, 5, 4).double(), torch.randint(0, 4, (5,))

    return script_of_pictures(model, make=make)


def sequences_pooled_in_transposed_memory():
    pool, model = nn.AdaptiveAvgPool1d(1), nn.Linear(3, 4).double()

    def loss(images, labels):
        steps = images.flatten(2).transpose(1, 2).contiguous().transpose(1, 2)
        return F.cross_entropy(model(pool(steps).squeeze(2)), labels)

    return Script(function=loss, modules={"model": model}, batches=batches(pictures))


def transposed_argument():
    model = perceptron()

    def loss(features, labels):
        noisy = F.dropout(features, 0.4)
        return F.cross_entropy(model(noisy), labels) + torch.det(features[:5, :5]), noisy

    def make():
        features, labels = rows(7)
        return features.t().contiguous().t(), labels

    return Script(function=loss, modules={"model": model}, batches=batches(make))


def noise_in_transposed_memory():
    model = perceptron()

    def loss(features, labels):
        mask = torch.empty_like(features.t()).bernoulli_(0.5).t()
        noise = torch.rand_like(features.t()).t() + torch.empty_like(features.t()).normal_().t()
        return F.cross_entropy(model(F.dropout(features * mask + noise, 0.2)), labels), mask

    return Script(function=loss, modules={"model": model}, batches=batches())


def determinants_of_transposed_values():
    model = nn.Linear(6, 6).double()

    def loss(features, labels):
        out = model(features)
        square = out.t() @ out + torch.eye(6).double()
        return F.cross_entropy(out, labels) + torch.det(square.t()) / 1e3 + torch.slogdet(square.t())[1]

    return Script(function=loss, modules={"model": model}, batches=batches())


def batch_of_transposed_determinants():
    model = nn.Linear(6, 9).double()

    def loss(features, labels):
        out = model(features)
        square = out.view(-1, 3, 3).transpose(1, 2)
        return F.cross_entropy(out, labels) + torch.det(square).sum() + torch.logdet(square @ square.mT + 1).mean()

    return Script(function=loss, modules={"model": model}, batches=batches())


CASES = [
    AdversarialCase(build=parameter_that_is_only_summed),
    AdversarialCase(build=parameters_with_one_gradient),
    AdversarialCase(build=gradients_kept),
    AdversarialCase(build=views_of_gradients_kept),
    AdversarialCase(build=gradient_that_is_a_result),
    AdversarialCase(build=transposed_parameter),
    AdversarialCase(build=channels_last_model),
    AdversarialCase(build=channels_last_pictures),
    AdversarialCase(build=channels_last_from_the_second_call_on),
    AdversarialCase(build=channels_last_model_pooled_to_one_pixel),
    AdversarialCase(build=channels_last_volumes_pooled_to_one_point),
    AdversarialCase(build=sequences_pooled_in_transposed_memory),
    AdversarialCase(build=transposed_argument),
    AdversarialCase(build=noise_in_transposed_memory),
    AdversarialCase(build=determinants_of_transposed_values),
    AdversarialCase(build=batch_of_transposed_determinants),
]
