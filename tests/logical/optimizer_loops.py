"""Ordinary loops on one (7, 5) batch that use, read, change, save and load optimizers in every way: for `zero=`.

Each returns what a script could see: losses, gradients, parameters, optimizer state.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from logical.calls import LABELS
from torch import Tensor, nn
from torch.optim import Optimizer

Loop = Callable[[Tensor], Any]
MakeOptimizer = Callable[[Any], Optimizer]


def make_model(seed: int = 2, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 5), nn.Linear(5, 5))


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch.detach()), LABELS)


def step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> float:
    optimizer.zero_grad()
    loss = compute_loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def list_values(model: nn.Module) -> list[Tensor]:
    return [item.detach().clone() for item in model.state_dict().values()]


def list_state(*optimizers: Optimizer) -> Any:
    """Return the state of optimizers, as plain tensors."""
    with torch.no_grad():
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
            for optimizer in optimizers
            for entries in optimizer.state_dict()["state"].values()
        ]


def train(make_optimizer: MakeOptimizer, steps: int = 4) -> Loop:
    def run(batch: Tensor) -> Any:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        losses = [step(model, optimizer, batch) for _ in range(steps)]
        gradients = [parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None]
        return losses, gradients, list_values(model), list_state(optimizer)

    return run


def adam(parameters: Any, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=0.05, **options)


def train_owned(kind: MakeOptimizer) -> Loop:
    """Return a loop with an optimizer that reads whole tensors, on the matrices, and Adam on the rest."""

    def run(batch: Tensor) -> Any:
        model = make_model()
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        optimizers = kind(matrices), adam(others)
        losses = []
        for _ in range(4):
            loss = compute_loss(model, batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses, list_values(model), list_state(*optimizers)

    return run


def clip_and_scale(batch: Tensor) -> Any:
    model = make_model()
    optimizer, norms = adam(model.parameters()), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, batch)).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    return norms, scaler.get_scale(), list_values(model), list_state(optimizer)


def scale_without_unscaling(make_optimizer: MakeOptimizer) -> Loop:
    def run(batch: Tensor) -> Any:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(compute_loss(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        return gradients, list_values(model), list_state(optimizer)

    return run


def overflow(batch: Tensor) -> Any:
    """A step that a scaler leaves out, because a gradient is infinite."""
    model = make_model()
    optimizer = adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(3):
        optimizer.zero_grad()
        factor = float("inf") if number == 1 else 1.0
        scaler.scale(compute_loss(model, batch) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), list_values(model), list_state(optimizer)


def accumulate(set_to_none: bool) -> Loop:
    def run(batch: Tensor) -> Any:
        model = make_model()
        optimizer, seen = adam(model.parameters()), []
        for number in range(6):
            (compute_loss(model, batch + number) / 3).backward()
            if number == 1:
                seen.append(model[0].weight.grad.clone())
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                seen.append(None if model[0].weight.grad is None else model[0].weight.grad.sum().item())
        return seen, list_values(model), list_state(optimizer)

    return run


def edit_gradients(batch: Tensor) -> Any:
    model = make_model()
    optimizer, seen = adam(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.5)
            parameter.grad[0] = 0.25
            parameter.grad += 0.01 * parameter.detach()
        model[0].weight.grad = model[0].weight.grad.sign()
        optimizer.step()
        seen += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    return seen, list_values(model), list_state(optimizer)


def hook_gradients(batch: Tensor) -> Any:
    model, seen = make_model(), []
    optimizer = adam(model.parameters())
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[3].weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.norm().item()))
    losses = [step(model, optimizer, batch) for _ in range(3)]
    return losses, seen, list_values(model), list_state(optimizer)


def step_in_backward(batch: Tensor) -> Any:
    model = make_model()
    optimizers = {parameter: adam([parameter]) for parameter in model.parameters()}

    def on_gradient(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)
    for _ in range(3):
        compute_loss(model, batch).backward()
    return list_values(model), list_state(*optimizers.values())


def use_gradients(batch: Tensor) -> Any:
    """Gradients in operations on batches, norms, comparisons, numpy and prints."""
    model = make_model()
    optimizer, seen = adam(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        gradient = model[0].weight.grad
        seen += [(batch.detach() @ gradient.t()).sum(), (gradient[0] * batch.detach()).sum(), f"{gradient.max():.6f}"]
        seen += [torch.stack([item.grad.norm() for item in model.parameters()]), gradient.numpy().copy()]  # type: ignore[union-attr]
        seen.append(torch.cat([item.grad.flatten() for item in model.parameters()]))  # type: ignore[union-attr]
        optimizer.step()
    return seen, list_values(model)


def average_weights(batch: Tensor) -> Any:
    model = make_model()
    optimizer = adam(model.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    own = copy.deepcopy(model)
    for _ in range(3):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
        with torch.no_grad():
            for mean, parameter in zip(own.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
    return list_values(averaged.module), list_values(own)


def schedule(batch: Tensor) -> Any:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    losses = []
    for _ in range(5):
        losses.append((step(model, optimizer, batch), scheduler.get_last_lr()[0]))
        scheduler.step()
    return losses, list_values(model), list_state(optimizer)


def add_groups(batch: Tensor) -> Any:
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.05)
    losses = [step(model, optimizer, batch) for _ in range(2)]
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01, "weight_decay": 0.3})
    losses += [step(model, optimizer, batch) for _ in range(2)]
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    losses += [step(model, optimizer, batch) for _ in range(2)]
    del optimizer.param_groups[1]
    losses += [step(model, optimizer, batch) for _ in range(2)]
    return losses, list_values(model), [entries["exp_avg"].clone() for entries in optimizer.state.values()]


def freeze(batch: Tensor) -> Any:
    """Parameters without gradients for some steps, from the start and in between."""
    model = make_model()
    optimizer, losses = adam(model.parameters(), weight_decay=0.1), []
    for number in range(5):
        for parameter in model[0].parameters():
            parameter.requires_grad_(number % 2 == 1)
        losses.append(step(model, optimizer, batch))
    return losses, list_values(model), list_state(optimizer)


def share_parameters(batch: Tensor) -> Any:
    """Two optimizers step the same parameters, one of them only some; a tied weight."""
    model = make_model()
    model[4].weight = nn.Parameter(torch.ones(5, 5) / 5)
    tied = nn.Linear(5, 5, bias=False)
    tied.weight = model[4].weight
    model.append(tied)
    first, second = adam(model.parameters()), torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        losses.append(step(model, first, batch))
        second.step()
    return losses, list_values(model), list_state(first, second)


def take_turns(batch: Tensor) -> Any:
    """A generator and a critic, whose optimizers step in turn."""
    torch.manual_seed(2)
    critic, generator = nn.Linear(5, 1, bias=False), nn.Linear(3, 5)
    of_critic, of_generator = adam(critic.parameters()), torch.optim.RMSprop(generator.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        noise = torch.randn(7, 3)
        of_critic.zero_grad()
        loss = critic(generator(noise).detach()).mean() - critic(batch.detach()).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = -critic(generator(noise)).mean()
        fooled.backward()
        of_generator.step()
        losses.append((loss.item(), fooled.item()))
    return losses, list_values(critic), list_values(generator), list_state(of_critic, of_generator)


def step_with_closure(make_optimizer: MakeOptimizer) -> Loop:
    def run(batch: Tensor) -> Any:
        model = make_model()
        optimizer, sizes = make_optimizer(model.parameters()), []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = compute_loss(model, batch)
            loss.backward()
            sizes.append([tuple(item.shape) for group in optimizer.param_groups for item in group["params"]])
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]  # type: ignore[attr-defined]
        return losses, sizes, list_values(model), list_state(optimizer)

    return run


def fail_between(batch: Tensor) -> Any:
    """Errors between backward and step, in a closure, and in the step itself."""
    model = make_model()
    optimizer, errors = adam(model.parameters()), []

    def closure() -> Tensor:
        raise ValueError("closure")

    for number in range(4):
        try:
            optimizer.zero_grad()
            loss = compute_loss(model, batch)
            loss.backward()
            if number == 1:
                raise ValueError("before the step")
            if number == 2:
                optimizer.step(closure)
            optimizer.step()
        except ValueError as error:
            errors.append(str(error))
    optimizer.param_groups[0]["betas"] = None
    with contextlib.suppress(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    step(model, optimizer, batch)
    return errors, list_values(model), list_state(optimizer)


def convert_model(batch: Tensor) -> Any:
    """A model whose parameters change their dtype, their memory order or their data after the first steps."""
    model = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.Linear(16, 5))
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    losses = [step(model, optimizer, batch) for _ in range(2)]
    with torch.no_grad():
        weight = model[3].weight
        weight.data = weight.t().contiguous().t() + 0.1  # type: ignore[operator,union-attr]
    losses += [step(model, optimizer, batch) for _ in range(2)]
    model[1].weight.data = torch.ones(4, 1, 2)
    losses += [step(model, optimizer, batch) for _ in range(2)]
    state = list_state(optimizer)
    model.float()
    for parameter in model.parameters():
        parameter.grad = None
        optimizer.state[parameter].clear()
    losses += [round(step(model, optimizer, batch.float()), 2)]
    return losses, state, [str(item.dtype) for item in model.parameters()]


def train_small(batch: Tensor) -> Any:
    """Parameters without dims, of one element, of no elements, of one row, and one that is no `Parameter`."""
    torch.manual_seed(2)
    shapes = ((), (1,), (1, 5), (5, 1), (2, 5), (0, 3), (3, 2, 5))
    given: list[Tensor] = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    given.append(torch.randn(5, requires_grad=True))
    optimizer, losses = adam(given), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum(
            ((batch.detach().sum() * item + 1).square().mean() for item in given if item.numel()), torch.zeros(())
        )
        loss = loss + (batch.detach() @ given[7] + given[0]).sin().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, given, list_state(optimizer)


def train_embedding(sparse: bool, make_optimizer: MakeOptimizer) -> Loop:
    def run(batch: Tensor) -> Any:
        torch.manual_seed(2)
        table, head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 5)
        optimizers = make_optimizer(table.parameters()), adam(head.parameters())
        losses = []
        for number in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            indices = (batch.detach().sum(1).long() + number) % 9
            loss = F.cross_entropy(head(table(indices)), LABELS)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses, list_values(table), list_values(head), list_state(*optimizers)

    return run


def become_sparse(batch: Tensor) -> Any:
    """A table whose gradient is dense in some steps, and sparse in others."""
    torch.manual_seed(2)
    table = nn.Embedding(9, 5)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    for number in range(5):
        table.sparse = number in (1, 2, 4)
        optimizer.zero_grad()
        F.cross_entropy(table(batch.detach().sum(1).long() % 9), LABELS).backward()
        optimizer.step()
    return list_values(table), list_state(optimizer)


def differentiate_step(batch: Tensor) -> Any:
    """A differentiable optimizer, as for meta-learning, on tensors that are no leaves."""
    start = torch.ones(5, 5, requires_grad=True)
    weight, rate = start.clone(), torch.tensor(0.1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, differentiable=True)
    for _ in range(2):
        loss = F.cross_entropy(batch.detach() @ weight * rate, LABELS)
        (weight.grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        optimizer.step()
    F.cross_entropy(batch.detach() @ weight * rate, LABELS).backward()
    return start.grad, rate.grad


class Doubled(torch.optim.Adam):
    """A subclass that steps twice."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step()


class Lion(Optimizer):
    """An optimizer of the script's own."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.add_((moments * 0.9 + parameter.grad * 0.1).sign(), alpha=-group["lr"])
                moments.lerp_(parameter.grad, 0.01)


def replace_gradients(batch: Tensor) -> Any:
    """Gradients that come from `torch.autograd.grad`, from another model, or from nowhere."""
    model, other = make_model(), make_model(seed=3)
    optimizer, parameters = adam(model.parameters()), list(model.parameters())
    for number in range(4):
        if number == 0:
            found: Any = torch.autograd.grad(compute_loss(model, batch), parameters)
        elif number == 1:
            compute_loss(other, batch).backward()
            found = [item.grad for item in other.parameters()]
        elif number == 2:
            compute_loss(model, batch).backward()
            found = [item.grad.clone().neg_() for item in parameters]  # type: ignore[union-attr]
        else:
            found = [torch.ones_like(item) for item in parameters]
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return list_values(model), list_state(optimizer), [item.grad.sum().item() for item in parameters]  # type: ignore[union-attr]


def use_every_flag() -> Iterator[tuple[str, Loop]]:
    """Yield loops with each of PyTorch's optimizers, and with their flags."""
    kinds: dict[str, MakeOptimizer] = {
        "asgd": lambda given: torch.optim.ASGD(given, lr=0.1),
        "adadelta": lambda given: torch.optim.Adadelta(given, lr=0.5),
        "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, initial_accumulator_value=0.1),
        "adam amsgrad": lambda given: torch.optim.Adam(given, amsgrad=True, weight_decay=0.1),
        "adamw": lambda given: torch.optim.AdamW(given, lr=0.05),
        "adamw foreach": lambda given: torch.optim.AdamW(given, lr=0.05, foreach=True),
        "adamw fused": lambda given: torch.optim.AdamW(given, lr=0.05, fused=True),
        "adamw one by one": lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.05), foreach=False, maximize=True),
        "adamax": lambda given: torch.optim.Adamax(given, lr=0.05),
        "nadam": lambda given: torch.optim.NAdam(given, lr=0.05, decoupled_weight_decay=True),
        "radam": lambda given: torch.optim.RAdam(given, lr=0.05),
        "rmsprop": lambda given: torch.optim.RMSprop(given, lr=0.01, momentum=0.9, centered=True),
        "rprop": lambda given: torch.optim.Rprop(given, lr=0.01),
        "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
        "sgd nesterov": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
        "sgd fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
        "adafactor": lambda given: torch.optim.Adafactor(given, lr=0.05),
        "a subclass": lambda given: Doubled(given, lr=0.05),
        "of the script": Lion,
    }
    for name, kind in kinds.items():
        yield name, train(kind)


OPTIMIZER_LOOPS: dict[str, Loop] = {
    **dict(use_every_flag()),
    "muon": train_owned(lambda given: torch.optim.Muon(given, lr=0.05)),
    "adafactor of matrices": train_owned(lambda given: torch.optim.Adafactor(given, lr=0.05)),
    "clip and scale": clip_and_scale,
    "scale": scale_without_unscaling(adam),
    "scale fused": scale_without_unscaling(lambda given: adam(given, fused=True)),
    "overflow": overflow,
    "accumulate": accumulate(set_to_none=True),
    "accumulate zeros": accumulate(set_to_none=False),
    "edit gradients": edit_gradients,
    "hook gradients": hook_gradients,
    "step in backward": step_in_backward,
    "use gradients": use_gradients,
    "average weights": average_weights,
    "schedule": schedule,
    "add groups": add_groups,
    "freeze": freeze,
    "share parameters": share_parameters,
    "take turns": take_turns,
    "closure": step_with_closure(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
    "closure of lbfgs": step_with_closure(lambda given: torch.optim.LBFGS(given, max_iter=3)),
    "closure of adafactor": step_with_closure(lambda given: torch.optim.Adafactor(given, lr=0.05)),
    "fail between": fail_between,
    "convert model": convert_model,
    "small": train_small,
    "embedding": train_embedding(False, lambda given: torch.optim.Adagrad(given, lr=0.1)),
    "sparse adagrad": train_embedding(True, lambda given: torch.optim.Adagrad(given, lr=0.1)),
    "sparse sgd": train_embedding(True, lambda given: torch.optim.SGD(given, lr=0.1)),
    "sparse adam": train_embedding(True, lambda given: torch.optim.SparseAdam(list(given), lr=0.1)),
    "become sparse": become_sparse,
    "differentiable": differentiate_step,
    "replace gradients": replace_gradients,
}
