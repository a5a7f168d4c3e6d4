"""Pieces of ordinary loops on one (7, 5) batch: for the logical view and for plain PyTorch.

Each returns what a script could see: losses, gradients, parameters, printed numbers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from logical.calls import LABELS
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

Loop = Callable[[Tensor], Any]


def make_linear(width: int = 5, *, seed: int = 2) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(5, width)


def list_gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def list_values(module: nn.Module) -> list[Tensor]:
    return [item.detach().clone() for item in module.state_dict().values()]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


BAGS: tuple[dict[str, Any], ...] = (
    *({}, {"mode": "sum"}, {"mode": "max"}, {"padding_idx": 3}, {"sparse": True}, {"include_last_offset": True}),
    *({"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"mode": "sum", "weighs": True}, {"words": 0, "starts": 0}),
    *({"mode": "sum", "sparse": True, "padding_idx": -1}, {"ids_first": False}),
)


def sum_bags(batch: Tensor, *, words: int = 23, starts: Any = None, weighs: bool = False, **options: Any) -> Any:
    """Return the sums of bags of words, one bag for each row, and the gradients; some bags are empty."""
    dtype = torch.int32 if options.get("sparse") else torch.int64
    table = torch.arange(60.0).view(30, 2).sin().requires_grad_()  # more rows than there are words
    given = torch.tensor([0, 2, 2, 9, 14, 15, 23 - 5 * ("include_last_offset" not in options)])
    offsets = (batch.detach()[:, 0] * 0 + (given if starts is None else starts)).to(dtype)
    bags = (torch.arange(words) * 7 % 10).to(dtype)
    weights = torch.arange(1.0, words + 1).requires_grad_() if weighs else None
    order = (bags, table) if options.pop("ids_first", True) else (table, bags)  # which PyTorch took once
    found = F.embedding_bag(*order, offsets, per_sample_weights=weights, **options)
    (found * torch.arange(1.0, len(found) + 1).unsqueeze(1)).sum().backward()
    gradient = table.grad.to_dense() if options.get("sparse") else table.grad
    return found, gradient, None if weights is None else weights.grad, table.detach()


def train(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> Loop:
    """Return a loop of three steps."""

    def run(batch: Tensor) -> Any:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 5))
        optimizer = make_optimizer(model.parameters())
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.detach()), LABELS)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, list_values(model)

    return run


def train_by_closure(batch: Tensor) -> Any:
    model = make_linear()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.detach()), LABELS)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)], list_values(model)


def train_scaled(batch: Tensor) -> Any:
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.detach()), LABELS)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return loss.item(), list_values(model)


def accumulate(batch: Tensor) -> Any:
    model = make_linear(3)
    for number in range(3):
        F.mse_loss(model(batch * number), torch.ones(7, 3)).backward(retain_graph=True)
    return list_gradients(model)


def penalize_gradients(batch: Tensor) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    x = batch if batch.requires_grad else batch.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = ((gradient.norm(dim=1) - 1) ** 2).mean()
    loss.backward(retain_graph=True)
    return loss, list_gradients(model)


def train_wgan(batch: Tensor) -> Any:
    torch.manual_seed(2)
    critic = nn.Sequential(
        *(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(6, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 1)),
    )
    optimizer, losses = torch.optim.SGD(critic.parameters(), lr=0.01), []
    for _ in range(2):
        real = batch.detach().sin()  # rows at even distances have a norm of zero, where the gradient jumps
        mixed = (real + torch.rand(real.size(0), 1) * (real.flip(0) - real)).requires_grad_()
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(real).mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        losses.append((loss.item(), list_gradients(critic)))
        optimizer.step()
    return losses, list_values(critic)


def clip(batch: Tensor) -> Any:
    model = make_linear(3)
    model(batch).square().mean().backward(retain_graph=True)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    return norm, list_gradients(model)


def hook_parameters(batch: Tensor) -> Any:
    model, seen = make_linear(3), []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.abs().max().item())
        return gradient.clamp(-0.5, 0.5)

    model.weight.register_hook(hook)
    model(batch).square().sum().backward(retain_graph=True)
    return seen, list_gradients(model)


def hook_modules(batch: Tensor) -> Any:
    model, seen = make_linear(3), []
    model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.mean().item()))
    model.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].sum().item()))
    model(batch).square().sum().backward(retain_graph=True)
    return seen, list_gradients(model)


def keep_averages(batch: Tensor) -> Any:
    model, average, total, seen = make_linear(3), torch.zeros(3), torch.zeros(()), 0.0
    for number in range(3):
        output = model(batch * number)
        average.mul_(0.9).add_(output.mean(0).detach(), alpha=0.1)
        total += output.sum().detach()
        seen += output.sum().item() / len(batch)
    return average, total, seen


def count_confusions(batch: Tensor) -> Tensor:
    counts = torch.zeros(5, 5)
    for found, label in zip(batch.argmax(1), LABELS, strict=True):
        counts[found, label] += 1
    return counts


def collect_lists(batch: Tensor) -> Any:
    found: list[Any] = []
    found.extend(batch.argmax(1).tolist())
    found += (batch[:, 0] > 0).cpu().numpy().tolist()
    return found


def train_vae(batch: Tensor) -> Any:
    torch.manual_seed(3)
    encoder, decoder = nn.Linear(5, 4), nn.Linear(2, 5)
    mean, log_variance = encoder(batch).chunk(2, 1)
    latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    loss = F.mse_loss(decoder(latent), batch.detach(), reduction="sum") + divergence
    loss.backward(retain_graph=True)
    return loss, list_gradients(encoder, decoder)


def train_gan(batch: Tensor) -> Any:
    torch.manual_seed(3)
    generator, critic, real = nn.Linear(3, 5), nn.Linear(5, 1), batch.detach()
    loss = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)
    made = generator(torch.randn(real.size(0), 3))
    critic_loss = loss(critic(real), ones) + loss(critic(made.detach()), zeros)
    critic_loss.backward()
    gradients = [parameter.grad.clone() for parameter in critic.parameters()]
    generator_loss = loss(critic(made), ones)
    generator_loss.backward()
    return critic_loss, generator_loss, gradients, list_gradients(generator)


def decay_weights(batch: Tensor) -> Any:
    model = make_linear()
    loss = F.cross_entropy(model(batch), LABELS) + 1e-2 * sum(item.pow(2).sum() for item in model.parameters())
    loss.backward(retain_graph=True)
    return loss, list_gradients(model)


def differentiate_weights_alone(batch: Tensor) -> Any:
    model = make_linear()
    (batch.detach() @ torch.ones(5)).sum()
    model.weight.pow(2).sum().backward()
    return model.weight.grad


def parametrize(parametrization: Callable[[nn.Module], nn.Module]) -> Loop:
    """Return a step of a layer whose weight is computed."""

    def run(batch: Tensor) -> Any:
        model = parametrization(make_linear())
        F.cross_entropy(model(batch), LABELS).backward(retain_graph=True)
        return list_gradients(model)

    return run


def recompute(*, reentrant: bool) -> Loop:
    """Return a step with an activation checkpoint."""

    def run(batch: Tensor) -> Any:
        torch.manual_seed(3)
        first, last = nn.Linear(5, 6), nn.Linear(6, 5)

        def block(x: Tensor) -> Tensor:
            return F.dropout(torch.relu(first(x)), 0.3)

        loss = F.cross_entropy(last(checkpoint(block, batch, use_reentrant=reentrant)), LABELS)
        loss.backward(retain_graph=True)
        return loss, list_gradients(first, last)

    return run


def pack_sequences(batch: Tensor) -> Any:
    torch.manual_seed(3)
    model, lengths = nn.LSTM(1, 3, batch_first=True), torch.tensor([5, 4, 4, 3, 2, 2, 1])
    output, (hidden, _) = model(pack_padded_sequence(batch.unsqueeze(-1), lengths, batch_first=True))
    loss = pad_packed_sequence(output, batch_first=True)[0].sum() + hidden.pow(2).sum()
    loss.backward(retain_graph=True)
    return loss, list_gradients(model)


def branch_on_values(batch: Tensor) -> Tensor:
    found = batch * 2 if batch.mean() > 0 else batch - 1
    while found.abs().max() > 3:
        found = found / 2
    return found


def set_elements(batch: Tensor) -> Tensor:
    found = batch.clone()
    found[2] = 0
    found[:, 1] = found[:, 0]
    found[found > 5] = 5
    return found


def change_through_views(batch: Tensor) -> Any:
    found = batch.clone()
    flat = found.view(-1)
    flat.mul_(2)
    column = found[:, 1]
    column += 10
    return found, flat


def retain_gradient(batch: Tensor) -> Any:
    copy = batch.clone()
    if not copy.requires_grad:
        return copy.sum()
    copy.retain_grad()
    (copy * 3).sum().backward(retain_graph=True)
    return copy.grad


def evaluate_after_training(batch: Tensor) -> Any:
    model = nn.BatchNorm1d(5)
    model(batch)
    model.eval()
    return model(batch), list_values(model)


def train_sparsely(batch: Tensor) -> Any:
    torch.manual_seed(2)
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = table(batch.detach().long().clamp(0, 9)).pow(2).mean()
        loss.backward()
        optimizer.step()
    found = table.weight.grad
    (again,) = torch.autograd.grad(table(batch.detach().long().clamp(0, 9)).sum(), table.weight)
    table.weight.pow(2).sum().backward()
    return loss, found.coalesce().to_dense(), again.to_dense(), *list_gradients(table), list_values(table)


def read_in_inference_mode(batch: Tensor) -> Any:
    with torch.inference_mode():
        found = batch * 2
        seen = [found.mean().item(), found[0].tolist()]
        found[1] = 5
        seen.append(found.sum().item())
        found.add_(1)
        return seen, found[1].tolist(), found.max().item(), found.is_inference()


def train_under_a_mode(batch: Tensor) -> Any:
    with torch.device("cpu"):  # a mode that sees every function
        found = hook_parameters(batch), penalize_gradients(batch)
        copy, seen = batch * torch.ones(5, requires_grad=True), []
        copy.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        copy.pow(2).sum().backward(retain_graph=True)
        return found, seen


def train_compiled(batch: Tensor) -> Any:
    model = make_linear()

    @torch.compile(backend="aot_eager")
    def compute(x: Tensor) -> Tensor:
        return F.gelu(model(x)).mean()

    loss = compute(batch.detach())
    loss.backward()
    return loss, list_gradients(model)


def train_scripted(batch: Tensor) -> Any:
    model = torch.jit.script(nn.Sequential(make_linear(), nn.BatchNorm1d(5), nn.ReLU()))
    loss = model(batch.detach().sin()).square().sum()
    loss.backward()
    return loss, list_gradients(model), list_values(model)


def step_in_hooks(batch: Tensor) -> Any:
    model, losses = nn.Sequential(make_linear(), nn.Tanh(), make_linear(2)), []
    optimizers = {item: torch.optim.SGD([item], lr=0.1, momentum=0.9) for item in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss = model(batch.detach()).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, list_values(model), list_gradients(model)


def retain_gradient_of_weight(batch: Tensor) -> Any:
    model = make_linear()
    weight = model.weight * 2
    weight.retain_grad()
    for _ in range(2):
        F.linear(batch.detach(), weight).square().sum().backward(retain_graph=True)
    return weight.grad, list_gradients(model)


def differentiate_gradients(batch: Tensor) -> Any:
    model = make_linear(1)
    gradients = []
    for _ in range(2):
        model(batch.detach()).sin().sum().backward(create_graph=True)
        sum(item.grad.square().sum() for item in model.parameters()).backward()
        gradients.append([item.grad.detach().clone() for item in model.parameters()])
    model.zero_grad()
    return gradients


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> Tensor:
        raise ValueError("this pass ends here")


def fail_in_backward(batch: Tensor) -> Any:
    first, last = make_linear(), make_linear(3)
    last(first(batch.detach())).sum().backward()
    before = [gradient.clone() for gradient in list_gradients(first)]
    with contextlib.suppress(ValueError):
        last(Failing.apply(first(batch.detach()))).square().sum().backward()
    unchanged = [torch.equal(one, other) for one, other in zip(before, list_gradients(first), strict=True)]
    last.zero_grad()
    last(first(batch.detach())).square().mean().backward()
    return unchanged, list_gradients(first, last)


def tie_weights(batch: Tensor) -> Any:
    torch.manual_seed(2)
    rows, output, ids = nn.Embedding(10, 5), nn.Linear(5, 10, bias=False), batch.detach().long().abs() % 10
    output.weight = rows.weight
    loss = F.cross_entropy(output(rows(ids)).flatten(0, 1), ids.flatten())
    loss.backward()
    return loss, list_gradients(rows)


def checkpoint_twice(batch: Tensor) -> Any:
    first, last = make_linear(), make_linear(1)
    hidden = first(batch.detach())
    for _ in range(2):  # each of the passes within the pass computes a term of the gradient of one weight
        hidden = checkpoint(lambda x: torch.tanh(first(x)), hidden, use_reentrant=True)
    last(hidden).sum().backward()
    return list_gradients(first, last)


def train_lstm_in_float32(batch: Tensor) -> Any:
    torch.manual_seed(3)
    model = nn.LSTM(1, 3, batch_first=True).float()
    output, (hidden, _) = model(batch.detach().float().unsqueeze(-1))
    loss = output.pow(2).mean() + hidden.sum()
    loss.backward()
    return round(loss.item(), 4), [round(item.grad.sum().item(), 3) for item in model.parameters()]


def rearrange_rows(batch: Tensor) -> Any:
    model = make_linear(3)
    views = model(torch.cat([batch, batch * 2]))
    started = torch.cat((torch.tensor([]), batch.sum(1)))
    joined = torch.cat([batch, batch], axis=-2)
    joined[3] = 0
    joined.relu_()
    order = torch.tensor([3, 1, 2, 0, 6, 5, 4])
    permuted = (batch * 1.0)[order]
    permuted.mul_(2)
    few, columns = batch[order[:1], :], batch[order[:3], 1:]
    return views, started, joined, joined.sum(0), permuted, permuted.tolist(), few, columns


def change_shapes(batch: Tensor) -> Any:
    transposed, longer, moved = batch.clone(), batch.clone(), batch.clone().unsqueeze(1)
    transposed.t_()
    longer.unsqueeze_(0)
    doubled = longer * 2
    longer.squeeze_(0)
    moved.transpose_(1, 2)
    resized, other = batch.detach().clone(), batch.detach().clone()
    resized.resize_(5, 7)
    other.data = torch.ones(7, 2)
    shapes = [tuple(item.shape) for item in (transposed, longer, moved, resized, other)]
    return transposed, doubled, longer + 1, moved.sum(1), resized, other * 2, shapes


def write_to_given_tensors(batch: Tensor) -> Any:
    given, divided, empty = torch.empty(7, 5), torch.empty_like(batch.detach()), torch.empty(0)
    torch.mul(batch.detach(), 2, out=given)
    torch.add(batch.detach(), 1, out=divided)
    torch.exp(batch.detach() / 9, out=empty)
    return given, divided, empty


def change_under_views(batch: Tensor) -> Any:
    values = batch.detach().clone()
    row, part = values[2], values[1:4]
    values.add_(1)
    values.mul_(2)
    with torch.inference_mode():
        others = batch.detach() * 3
        line = others[2]
        others.add_(1)
    array = batch.detach().clone()
    shared = array.numpy()
    array.add_(5)
    return row, part, line.clone(), shared.tolist()


def transform(batch: Tensor) -> Any:
    model = make_linear(1)
    parameters = dict(model.named_parameters())

    def compute(weights: Any) -> Tensor:
        return torch.func.functional_call(model, weights, (batch.detach(),)).square().mean()

    return [torch.func.grad(compute)(parameters) for _ in range(2)]


def ask_for_gradients_of_iterables(batch: Tensor) -> Any:
    model = make_linear()
    loss = F.cross_entropy(model(batch.detach()), LABELS)
    found = torch.autograd.grad(loss, model.parameters(), create_graph=True)
    again = torch.autograd.grad(sum(item.sum() for item in found), dict(model.named_parameters()).values())
    edge = torch.autograd.graph.get_gradient_edge(model.bias)
    torch.autograd.backward(iter([model(batch.detach()).sum()]), inputs=model.parameters())
    return found, again, torch.autograd.grad(model(batch.detach()).sum(), edge), list_gradients(model)


def make_leaves_in_constructors(batch: Tensor) -> Any:
    def differentiate(leaf: Tensor) -> Any:
        (gradient,) = torch.autograd.grad(leaf.pow(3).sum(), leaf, create_graph=True)
        gradient.norm().backward()
        return leaf.requires_grad, leaf.is_leaf, leaf.grad

    plain = batch.detach()
    leaves = [make(plain, requires_grad=True) for make in (torch.tensor, torch.asarray, torch.autograd.Variable)]
    others = [torch.tensor(plain), torch.autograd.Variable(plain) * 2, torch.jit.script(scale)(plain)]
    return [*map(differentiate, leaves)], others, [other.requires_grad for other in others]


def scale(batch: Tensor) -> Tensor:
    return batch * torch.tensor([2.0])


LOOPS: dict[str, Loop] = {
    "sgd": train(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "adam": train(lambda parameters: torch.optim.Adam(parameters, lr=0.1)),
    "adagrad": train(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)),
    "lbfgs": train_by_closure,
    "scaler": train_scaled,
    "accumulation": accumulate,
    "gradient penalty": penalize_gradients,
    "wgan": train_wgan,
    "clipping": clip,
    "hooks of parameters": hook_parameters,
    "hooks of modules": hook_modules,
    "averages": keep_averages,
    "confusion matrix": count_confusions,
    "lists": collect_lists,
    "vae": train_vae,
    "gan": train_gan,
    "weight decay in the loss": decay_weights,
    "a loss of weights alone": differentiate_weights_alone,
    "weight norm": parametrize(nn.utils.parametrizations.weight_norm),
    "spectral norm": parametrize(nn.utils.parametrizations.spectral_norm),
    "checkpoint": recompute(reentrant=False),
    "reentrant checkpoint": recompute(reentrant=True),
    "packed sequences": pack_sequences,
    "branches": branch_on_values,
    "set elements": set_elements,
    "views": change_through_views,
    "retained gradient": retain_gradient,
    "evaluation": evaluate_after_training,
    "lstm in float32": train_lstm_in_float32,
    "rearranged rows": rearrange_rows,
    "sparse gradients": train_sparsely,
    "inference mode": read_in_inference_mode,
    "a mode of functions": train_under_a_mode,
    "compiled": train_compiled,
    "scripted": train_scripted,
    "steps in hooks": step_in_hooks,
    "retained gradient of a weight": retain_gradient_of_weight,
    "gradients of iterables": ask_for_gradients_of_iterables,
    "leaves of constructors": make_leaves_in_constructors,
    "gradients of gradients": differentiate_gradients,
    "failing": fail_in_backward,
    "tied weights": tie_weights,
    "checkpoints of one layer": checkpoint_twice,
    "changes of shapes": change_shapes,
    "given tensors": write_to_given_tensors,
    "changes under views": change_under_views,
    "transforms": transform,
    "custom function": lambda batch: Square.apply(batch),  # the view replaces `apply` before a script runs
    "bags with offsets": lambda batch: [sum_bags(batch, **options) for options in BAGS],
    "bags with wrong offsets": lambda batch: sum_bags(batch, starts=torch.arange(1, 8)),
}
