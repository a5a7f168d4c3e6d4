"""Models and scripts whose activations are computed again, in the forms that people write.

Each function receives `make`, which makes a job in this process's world, and returns tensors. The same code runs on
one device, there as plain PyTorch, and on several workers.
"""

import functools

import torch
import torch.nn.functional as F
from support.trainings import CLASSES, adamw, batches, list_cases, sgd, show
from torch import nn

WIDTH = 6


class Block(nn.Module):
    """Norm, two layers and dropout, around a residual connection."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Blocks in a list, and a head. `run` calls one block."""

    def __init__(self, run=lambda block, x: block(x), blocks=(Block, Block, Block)):
        super().__init__()
        self.layers = nn.ModuleList(make() for make in blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def train(make, model, loss=None, optimizer=None, **options):
    """Train on the batches of all cases, and return losses, parameters and the optimizer's state."""
    optimizer = optimizer or adamw(model)
    job = make(loss or (lambda x, y: F.cross_entropy(model(x), y)), model, optimizer, **options)
    found = []
    for batch in batches():
        results = job(*batch)
        found += list(results) if isinstance(results, tuple) else [results]
    return [*found, *show(model, optimizer)]


def blocks_in_a_list(make):
    return train(make, Blocks())


def blocks_in_a_sequence(make):
    return train(make, nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES)))


def one_block_called_several_times(make):
    model = Blocks(blocks=(Block, Block))
    return train(make, model, lambda x, y: F.cross_entropy(model.head(run_thrice(model.layers, x)), y))


def run_thrice(layers, x):
    for _ in range(3):
        for layer in layers:
            x = layer(layer(x))
    return x


def blocks_without_dropout_that_a_job_clips(make):
    return train(make, Blocks(blocks=[functools.partial(Block, 0.0)] * 4), clip_norm=0.5)


def calls_accumulated(make):
    model = Blocks()
    optimizer = sgd(model)
    job = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, accumulate=2)
    found = [job(*batch) for batch in batches(6)]
    return [*found, *show(model, optimizer)]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(F.relu(self.norm(self.first(x)), inplace=True))


def batch_norm_in_blocks(make):
    model = Blocks(blocks=(Normed, Normed))
    return train(make, model, optimizer=sgd(model))


class Noisy(nn.Module):
    """Draws noise of several distributions, and a matrix for all rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.layer(x) * torch.randn_like(x).exp() + torch.rand(WIDTH)
        x = x * torch.bernoulli(torch.full_like(x, 0.7))
        return self.other(x.tanh()) @ torch.randn(WIDTH, WIDTH)


def noise_in_blocks(make):
    return train(make, Blocks(blocks=(Noisy, Noisy)))


def noise_of_the_scripts_generator(make):
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)

    def run(block, x):
        return block(x * torch.rand(WIDTH, generator=generator)).sin()

    return train(make, Blocks(run))


class Attention(nn.Module):
    """Self-attention with a mask that is used twice, and dropout on probabilities."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cross = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        query, key, value = self.query(x), self.key(x), self.value(x)
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = (self.norm(x) @ key.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1)
        return x + F.dropout(scores, 0.2) @ value + self.cross(x, x, x, need_weights=False)[0]


def attention_with_a_shared_mask(make):
    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention()]), "head": nn.Linear(WIDTH, CLASSES)})

    def loss(x, y):
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        hidden = x.unsqueeze(1) * torch.arange(1, 5).view(4, 1)
        for layer in model["layers"]:
            hidden = layer(hidden, mask)
        return F.cross_entropy(model["head"](hidden.mean(1)), y)

    return train(make, model, loss, sgd(model))


def hidden_states_returned(make):
    """A value within a block is a result, and the first block's output goes into the last."""
    model = Blocks()

    def loss(x, y):
        first = model.layers[0](x)
        inner = model.layers[1].up(model.layers[1].norm(first))
        second = model.layers[1](first)
        return F.cross_entropy(model.head(model.layers[2](second + first)), y), inner, second

    return train(make, model, loss)


class Tuples(nn.Module):
    """Returns several values, some of them views of others and of its input."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        first, second = self.layer(x).chunk(2, -1)
        return {"out": self.scale(first.sigmoid()) * second.tanh(), "skip": (first[:, :2], x[:, 1:])}


def blocks_that_return_dicts(make):
    def run(block, x):
        found = block(x)
        first, rest = found["skip"]
        return found["out"] + first.sum(-1, keepdim=True) * rest.mean(-1, keepdim=True)

    return train(make, Blocks(run, (Tuples, Tuples)))


class Changing(nn.Module):
    """Changes values in place, through views too."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.layer(x)
        hidden[:, 0] = hidden[:, 1].exp()
        hidden.add_(x).mul_(2)
        hidden[:, 2:].mul_(0.5)
        return self.other(hidden.relu_() + x)


def values_changed_in_place(make):
    return train(make, Blocks(blocks=(Changing, Changing)))


def recurrent_blocks(make):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            return x + self.layer(self.norm(x).unsqueeze(1).repeat(1, 3, 1))[0][:, -1]

    return train(make, Blocks(blocks=(Recurrent, Recurrent)))


def mixture_of_experts(make):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in "abc"
            )

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            return x + sum(expert(x) * weights[:, [number]] for number, expert in enumerate(self.experts))

    return train(make, Blocks(blocks=(Mixture, Mixture)))


def gradient_penalty_of_blocks(make):
    model = Blocks(blocks=[functools.partial(Block, 0.0)] * 2)

    def loss(x, y):
        x = x.detach().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.logsumexp(-1).sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + (grad.norm(dim=-1) - 1).square().mean()

    return train(make, model, loss)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x**3

    @staticmethod
    def backward(ctx, grad):
        x, power = ctx.saved_tensors
        return grad * 3 * x**2 + 0 * power


def a_function_with_its_own_backward(make):
    return train(make, Blocks(lambda block, x: Cubed.apply(block(x)).sin()))


def blocks_in_bfloat16(make):
    model = Blocks()

    def loss(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.double(), y)

    return train(make, model, loss, sgd(model))


def weights_tied_between_blocks(make):
    model = Blocks()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[1].down.weight = nn.Parameter(model.layers[1].up.weight.detach().t().clone())
    return train(make, model)


def some_blocks_frozen(make):
    model = Blocks()
    model.layers[0].requires_grad_(False)
    return train(make, model, optimizer=sgd(model))


def the_input_requires_no_gradient_and_blocks_are_off_the_path(make):
    model = Blocks()

    def loss(x, y):
        with torch.no_grad():
            context = model.layers[2](x)
        return F.cross_entropy(model.head(model.layers[0](x) + context), y) + 0 * model.layers[1](context).sum()

    return train(make, model, loss)


def losses_inside_blocks(make):
    model = Blocks(lambda block, x: block(x))

    def loss(x, y):
        total = 0
        for layer in model.layers:
            x = layer(x)
            total = total + F.cross_entropy(model.head(x), y) + x.square().mean(1).mean()
        return total

    return train(make, model, loss)


def python_reads_a_value(make):
    def run(block, x):
        return block(x) * (2.0 if x.detach().mean().item() > 0 else 0.5)

    return train(make, Blocks(run, [functools.partial(Block, 0.0)] * 2))


def sections_of_a_plain_network(make):
    layers = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))]
    return train(make, nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))


def convolutions(make):
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(4, CLASSES)),
    )
    return train(make, model, lambda x, y: F.cross_entropy(model(x.view(-1, 1, 2, 3)), y), sgd(model))


CASES = list_cases(globals())
