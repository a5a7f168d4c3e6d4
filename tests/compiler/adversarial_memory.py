"""Adversarial cases with the memory of tensors: `.data`, `set_`, `swap_tensors`, `.grad`, storages, changes outside."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Shifted(nn.Module):
    """A linear layer with a buffer that its scores are shifted by."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.register_buffer("shift", torch.zeros(4).double())

    def forward(self, features):
        return self.linear(features) + self.shift


def script_changing(act, model=None):
    """Return a script whose job acts on its model after it has computed the loss."""
    model = model or perceptron()

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        act(model)
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def script_bending(act):
    """Return a script whose job acts on the features and on scores that have a gradient."""
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(act(model(features)), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def data_of_a_parameter_set():
    def act(model):
        model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)  # the line

    return script_changing(act)


def data_of_a_parameter_changed_in_place():
    def act(model):
        model[0].weight.data.clamp_(-0.1, 0.1)  # the line

    return script_changing(act)


def data_of_a_parameter_scaled():
    def act(model):
        model[0].weight.data *= 0.5  # the line

    return script_changing(act)


def row_of_a_parameter_cleared():
    def act(model):
        model[0].weight.detach()[0].zero_()  # the line

    return script_changing(act)


def parameters_from_a_vector():
    def act(model):
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())  # the line

    return script_changing(act)


def precision_changed_and_restored():
    def act(model):
        model.float().double()  # the line

    return script_changing(act)


def data_of_a_buffer_set():
    def act(model):
        model.shift.data = model.shift * 0.9 + 0.1  # the line

    return script_changing(act, Shifted())


def buffers_swapped():
    def act(model):
        torch.utils.swap_tensors(model.shift, model.shift + 1)  # the line

    return script_changing(act, Shifted())


def memory_of_a_buffer_set():
    def act(model):
        model.shift.set_(model.shift + 1)  # the line

    return script_changing(act, Shifted())


def storage_of_a_buffer_written():
    def act(model):
        model.shift.untyped_storage().copy_((model.shift + 1).untyped_storage())  # the line

    return script_changing(act, Shifted())


def gradient_of_a_parameter_set():
    def act(model):
        model[0].weight.grad = torch.ones_like(model[0].weight)  # the line

    return script_changing(act)


def data_of_scores_set():
    def act(scores):
        bent = scores * 2
        bent.data = bent.data.clamp(-0.2, 0.2)  # the line
        return bent * bent

    return script_bending(act)


def data_of_scores_changed_in_place():
    def act(scores):
        square = scores * scores
        scores.data.clamp_(-0.2, 0.2)
        return square + scores * scores

    return script_bending(act)


def data_of_scores_read():
    return script_bending(lambda scores: scores - scores.data + scores.data.round())


def data_of_a_buffer_changed_in_place():
    def act(model):
        model.shift.data *= 0.9
        model.shift.data += 0.1
        model.shift.data[:2].add_(1)
        model.shift.data = model.shift.data.contiguous()

    return script_changing(act, Shifted())


def model_converted_to_what_it_is():
    def act(model):
        model.to("cpu").double()
        model[0].weight.grad = None

    return script_changing(act)


def script_compiling(make):
    """Return a script whose job calls what `make` compiles of its model."""
    model = perceptron()
    compiled = make(model)

    def loss(features, labels):
        return F.cross_entropy(compiled(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def model_compiled():
    return script_compiling(lambda model: torch.compile(model, backend="eager"))


def model_compiled_in_place():
    def make(model):
        model.compile(backend="eager")
        return model

    return script_compiling(make)


def compiled_inside():
    return script_compiling(lambda model: lambda features: torch.compile(model, backend="eager")(features))


def script_noting(act):
    """Return a script whose job acts on a tensor outside it, and on its loss."""
    model, seen = perceptron(), torch.zeros(3).double()

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        act(seen, value.detach())
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def loss_written_outside():
    def act(seen, value):
        seen[0] = value  # the line

    return script_noting(act)


def loss_added_outside():
    def act(seen, value):
        seen += value  # the line

    return script_noting(act)


def calls_counted_outside():
    def act(seen, _value):
        seen[1] += 1  # the line

    return script_noting(act)


def averages_kept_outside():
    def act(seen, value):
        torch._foreach_lerp_([seen], [value.expand(3)], 0.1)  # the line

    return script_noting(act)


def result_put_outside():
    def act(seen, value):
        torch.mul(value.expand(3), 2, out=seen)  # the line

    return script_noting(act)


def gradient_of_a_parameter_read():
    def act(model):
        assert model[0].weight.grad is not None  # the line

    return script_changing(act)


def parameter_changed_after_its_use():
    def act(model):
        with torch.no_grad():
            model[2].bias.mul_(0.5)

    return script_changing(act)


def data_changed_after_a_use_whose_gradient_needs_it():
    def act(model):
        model[2].weight.data.mul_(0.5)  # the plain backward pass uses the changed values too

    return script_changing(act)


def data_set_after_a_use_whose_gradient_needs_it():
    def act(model):
        model[2].weight.data = model[2].weight.data * 0.5  # the line

    return script_changing(act)


def data_set_to_memory_of_another():
    model = Shifted()

    def loss(features, labels):
        model.shift.data = model.linear.bias.data  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def data_set_and_the_old_kept():
    model, kept = Shifted(), []

    def loss(features, labels):
        model.shift.data = model.shift * 0.9 + features.mean()
        return F.cross_entropy(model(features), labels)

    def change(_):
        kept.append(model.shift.data)
        with torch.no_grad():
            model.linear.bias.add_(sum(kept))

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


CASES = [
    AdversarialCase(build=gradient_of_a_parameter_read, refused=r"\.grad of parameter 'model\.0\.weight' read"),
    AdversarialCase(build=data_of_a_parameter_set),
    AdversarialCase(build=data_of_a_parameter_changed_in_place),
    AdversarialCase(build=data_of_a_parameter_scaled),
    AdversarialCase(build=row_of_a_parameter_cleared),
    AdversarialCase(build=parameters_from_a_vector, refused=r"\.data of parameter 'model\.2\.bias' set after a use"),
    AdversarialCase(build=precision_changed_and_restored, refused=r"\.data of parameter 'model\.0\.weight' set"),
    AdversarialCase(build=data_of_a_buffer_set),
    AdversarialCase(build=buffers_swapped, refused=r"swap_tensors\(\) inside the job"),
    AdversarialCase(build=memory_of_a_buffer_set, refused=r"set_\(\) inside the job"),
    AdversarialCase(build=storage_of_a_buffer_written, refused=r"the storage of a tensor"),
    AdversarialCase(build=gradient_of_a_parameter_set, refused=r"\.grad of parameter 'model\.0\.weight' set"),
    AdversarialCase(build=data_of_scores_set, refused=r"\.data of a tensor set"),
    AdversarialCase(build=data_of_scores_changed_in_place),
    AdversarialCase(build=data_of_scores_read),
    AdversarialCase(build=data_of_a_buffer_changed_in_place),
    AdversarialCase(build=model_converted_to_what_it_is),
    AdversarialCase(build=model_compiled),
    AdversarialCase(build=model_compiled_in_place),
    AdversarialCase(build=compiled_inside),
    AdversarialCase(build=loss_written_outside, refused=r"of shape \[3\] from outside the job changed in place"),
    AdversarialCase(build=loss_added_outside, refused=r"of shape \[3\] from outside the job changed in place"),
    AdversarialCase(build=calls_counted_outside, refused=r"from outside the job changed in place"),
    AdversarialCase(build=averages_kept_outside, refused=r"of shape \[3\] from outside the job changed in place"),
    AdversarialCase(build=result_put_outside, refused=r"a tensor from outside the job changed in place"),
    AdversarialCase(build=parameter_changed_after_its_use),
    AdversarialCase(build=data_changed_after_a_use_whose_gradient_needs_it),
    AdversarialCase(build=data_set_and_the_old_kept),
    AdversarialCase(
        build=data_set_after_a_use_whose_gradient_needs_it, refused=r"'model\.2\.weight' set after a use whose gradient"
    ),
    AdversarialCase(build=data_set_to_memory_of_another, refused=r"set to a tensor that shares memory"),
]
