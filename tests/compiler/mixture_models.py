"""Mixtures of experts in the forms in which people write them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, EXPERTS = 16, 24, 4
ROWS, LENGTH = 8, 6


class Stacked(nn.Module):
    """Weights of all experts in two tensors."""

    def __init__(self, bias=False):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 1, HIDDEN) * 0.1) if bias else None

    def forward(self, x):  # (experts, slots, width)
        hidden = x @ self.up
        if self.up_bias is not None:
            hidden = hidden + self.up_bias
        return F.gelu(hidden) @ self.down


class Switch(nn.Module):
    """Top-1 with a capacity over the whole batch, by one-hot masks (Switch Transformer)."""

    def __init__(self, capacity=1.0, bias=False):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Stacked(bias)
        self.capacity = capacity

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        probabilities = self.router(tokens).softmax(-1)
        gate, index = probabilities.max(-1)
        mask = F.one_hot(index, EXPERTS)
        capacity = math.ceil(self.capacity * tokens.shape[0] / EXPERTS)
        position = mask.cumsum(0) * mask - 1
        kept = (position < capacity) & (position >= 0)
        slots = F.one_hot(position.clamp(0, capacity - 1), capacity) * kept.unsqueeze(-1)
        dispatch = slots.to(x.dtype)  # (tokens, experts, slots)
        inputs = torch.einsum("tec,td->ecd", dispatch, tokens)
        outputs = self.experts(inputs)
        mixed = torch.einsum("tec,ecd->td", dispatch * gate[:, None, None], outputs)
        fraction = mask.to(x.dtype).mean(0)
        loss = EXPERTS * (fraction * probabilities.mean(0)).sum()
        return x + mixed.view_as(x), loss


class Penalized(Switch):
    """Experts whose weights are to differ: a product of weights with each other."""

    def forward(self, x):
        result, loss = super().forward(x)
        directions = F.normalize(self.experts.up.flatten(1), dim=1)
        return result, loss + (directions @ directions.t() - torch.eye(EXPERTS, dtype=x.dtype)).square().sum()


class Grouped(nn.Module):
    """Top-2 with a capacity per sequence (GShard)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.experts_down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)

    def forward(self, x):  # (batch, length, width)
        capacity = 2 * x.shape[1] // EXPERTS
        scores = self.router(x).softmax(-1)
        weights, index = scores.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(index, EXPERTS)  # b s k e
        flat = mask.transpose(1, 2).reshape(x.shape[0], -1, EXPERTS)
        position = (flat.cumsum(1) - flat).view(x.shape[0], 2, x.shape[1], EXPERTS).transpose(1, 2)
        position = (position * mask).sum(-1)  # b s k
        kept = position < capacity
        slot = F.one_hot(position.clamp(max=capacity - 1), capacity) * kept.unsqueeze(-1)
        dispatch = torch.einsum("bske,bskc->bsec", mask.to(x.dtype), slot.to(x.dtype))
        combine = torch.einsum("bske,bskc,bsk->bsec", mask.to(x.dtype), slot.to(x.dtype), weights)
        inputs = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        hidden = torch.einsum("ebcd,edh->ebch", inputs, self.experts_up).relu()
        outputs = torch.einsum("ebch,ehd->ebcd", hidden, self.experts_down)
        loss = (scores.mean((0, 1)) * mask.to(x.dtype).mean((0, 1, 2))).sum() * EXPERTS
        return x + torch.einsum("bsec,ebcd->bsd", combine, outputs), loss


class Scattered(nn.Module):
    """Top-2 with a capacity over the batch; tokens are copied into slots by index."""

    def __init__(self, capacity=1.5):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Stacked()
        self.capacity = capacity

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        count = tokens.shape[0]
        weights, index = self.router(tokens).softmax(-1).topk(2, dim=-1)
        flat = index.flatten()
        mask = F.one_hot(flat, EXPERTS)
        position = ((mask.cumsum(0) - 1) * mask).sum(-1)
        capacity = int(self.capacity * 2 * count / EXPERTS)
        kept = position < capacity
        slot = torch.where(kept, flat * capacity + position, EXPERTS * capacity)
        buffer = tokens.new_zeros(EXPERTS * capacity + 1, WIDTH)
        buffer = buffer.index_add(0, slot, tokens.repeat_interleave(2, 0))
        outputs = self.experts(buffer[:-1].view(EXPERTS, capacity, WIDTH)).reshape(-1, WIDTH)
        outputs = torch.cat([outputs, outputs.new_zeros(1, WIDTH)])
        mixed = (outputs[slot] * (weights.flatten() * kept).unsqueeze(-1)).view(count, 2, WIDTH).sum(1)
        return x + mixed.view_as(x), x.new_zeros(())


class Sorted(nn.Module):
    """Every expert takes the tokens with its highest scores (expert choice)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Stacked()

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores = self.router(tokens).softmax(-1)
        weights, index = scores.t().topk(tokens.shape[0] // 2, dim=-1)  # experts, slots
        outputs = self.experts(tokens[index]) * weights.unsqueeze(-1)
        mixed = torch.zeros_like(tokens).index_add(0, index.flatten(), outputs.flatten(0, 1))
        return x + mixed.view_as(x), x.new_zeros(())


class Dense(nn.Module):
    """All experts compute all tokens, in two tensors."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)

    def forward(self, x):
        weights, index = self.router(x).topk(2, dim=-1)
        gates = weights.new_zeros(*x.shape[:-1], EXPERTS).scatter(-1, index, weights.softmax(-1))
        hidden = torch.einsum("bsd,edh->bseh", x, self.up).relu()
        mixed = torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, gates)
        return x + mixed, gates.mean((0, 1)).square().sum()


def make_expert(hidden=HIDDEN, dropout=0.0):
    """Return an expert as a module of its own."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, WIDTH))


class Gated(nn.Module):
    """An expert as in Llama, with a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x)) * self.scale


class Loop(nn.Module):
    """Experts that are modules; each computes all samples, with weights of zero for most."""

    def __init__(self, count=EXPERTS, make=make_expert):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList([make() for _ in range(count)])

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            result = result + weight * expert(x)
        shares = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1, 2))
        return x + result, (shares * self.router(x).softmax(-1).mean((0, 1))).sum()


class LoopOnResult(Loop):
    """The results of experts are added to the residual one after another, in place."""

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        result = x.clone()
        for number, expert in enumerate(self.experts):
            result += expert(x) * weights[..., number : number + 1]
        return result, weights.square().mean()


class StackedResults(Loop):
    """The results of all experts in one tensor, of which each sample takes some (MMoE)."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        results = torch.stack([expert(x) for expert in self.experts], dim=2)
        index = chosen[..., None, None].expand(-1, -1, 1, x.shape[-1])
        return x + weights.unsqueeze(-1) * results.gather(2, index).squeeze(2), weights.mean()


class MixedResults(Loop):
    """Results in one tensor, summed with the weights of two gates."""

    def forward(self, x):
        results = torch.stack([expert(x) for expert in self.experts])
        first, second = self.router(x).softmax(-1), self.router(-x).softmax(-1)
        mixed = torch.einsum("ebsd,bse->bsd", results, first), torch.einsum("ebsd,bse->bsd", results, second)
        return x + mixed[0] * mixed[1].tanh(), first.mean()


class LoopOverSlots(Loop):
    """Slots for each sequence, and one expert after another for its slots."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        masks = F.one_hot(chosen, len(self.experts))
        place = (masks.cumsum(1) * masks).sum(-1) - 1
        slots = F.one_hot(place.clamp(max=3), 4)[..., :3]
        places = (masks.unsqueeze(-1) * slots.unsqueeze(-2)).to(x.dtype)
        inputs = torch.einsum("bwes,bwd->ebsd", places, x)
        results = torch.stack([expert(part) for expert, part in zip(self.experts, inputs.unbind(0), strict=True)])
        return x + torch.einsum("bwes,ebsd->bwd", places * weights[..., None, None], results), weights.mean()


class Chunks(Loop):
    """Slots of the whole batch, in chunks."""

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores = self.router(tokens).softmax(-1)
        weights, index = scores.t().topk(tokens.shape[0] // 2, dim=-1)
        chunks = tokens[index.flatten()].chunk(len(self.experts), dim=0)
        results = torch.cat([expert(part) for expert, part in zip(self.experts, chunks, strict=True)])
        mixed = torch.zeros_like(tokens).index_add(0, index.flatten(), results * weights.flatten().unsqueeze(-1))
        return x + mixed.view_as(x), x.new_zeros(())


class Numbered(nn.Module):
    """Experts in attributes with numbers, and their outputs in a list."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        for number in range(EXPERTS):
            setattr(self, f"expert_{number}", make_expert())

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        results = [getattr(self, f"expert_{number}")(x) for number in range(EXPERTS)]
        return x + sum(weights[..., number, None] * result for number, result in enumerate(results)), weights.mean()


class Parameters(nn.Module):
    """The weights of experts in lists of parameters, with a bias for all."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.ParameterList([torch.randn(WIDTH, HIDDEN) * 0.2 for _ in range(EXPERTS)])
        self.down = nn.ParameterList([torch.randn(HIDDEN, WIDTH) * 0.2 for _ in range(EXPERTS)])
        self.bias = nn.Parameter(torch.randn(HIDDEN) * 0.1)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        result = 0
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            result = result + weights[..., number, None] * ((x @ up + self.bias).relu() @ down)
        return x + result, weights.mean()


class Convolution(nn.Module):
    """An expert whose results lie in memory as transposed ones do."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """An expert that is a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Normed(nn.Module):
    """An expert with a batch norm, whose statistics are those of the whole batch."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.up(x).flatten(0, 1)).view_as(x)


class WithLosses(Loop):
    """Experts that return a loss too, and a penalty on the weights of all experts."""

    def forward(self, x):
        weights, result, loss = self.router(x).softmax(-1), x, 0
        for number, expert in enumerate(self.experts):
            found = expert(x)
            result, loss = torch.addcmul(result, weights[..., number, None], found), loss + found.square().mean()
        penalties = [item.square().sum() for expert in self.experts for item in expert.parameters()]
        return result, loss + 0.001 * sum(penalties)


LOOPS = {
    "loop": Loop,
    "loop with three experts": lambda: Loop(3),
    "loop with five experts": lambda: Loop(5),
    "loop with dropout": lambda: Loop(make=lambda: make_expert(dropout=0.3)),
    "loop with gated experts": lambda: Loop(make=Gated),
    "loop on the residual": LoopOnResult,
    "convolutions": lambda: Loop(make=Convolution),
    "recurrent experts": lambda: Loop(make=Recurrent),
    "batch norms": lambda: Loop(make=Normed),
    "losses and penalties": WithLosses,
    "results in one tensor": StackedResults,
    "two gates": MixedResults,
    "slots and a loop": LoopOverSlots,
    "chunks": Chunks,
    "numbered attributes": Numbered,
    "lists of parameters": Parameters,
}
"""Mixtures whose experts are modules."""

FORMS = {
    "switch": Switch,
    "switch with few slots": lambda: Switch(0.6, bias=True),
    "penalty on weights": Penalized,
    "groups": Grouped,
    "slots by index": Scattered,
    "chosen by experts": Sorted,
    "all experts": Dense,
}


class Words(nn.Module):
    """Words, one mixture, and a head."""

    def __init__(self, mixture):
        super().__init__()
        self.words = nn.Embedding(30, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = mixture
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, ids):
        hidden, loss = self.mixture(self.norm(self.words(ids)))
        return self.head(hidden), loss


def make_mixture(name, rows=ROWS):
    """Return a job, its modules and its arguments, with a mixture of this form."""
    torch.manual_seed(0)
    model = Words((FORMS | LOOPS)[name]()).double()

    def train(ids, labels):
        logits, loss = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * loss

    ids = torch.randint(0, 30, (rows, LENGTH))
    return train, {"model": model}, [ids, ids.roll(-1, 1)]
