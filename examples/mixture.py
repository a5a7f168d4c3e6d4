"""A character-level transformer with experts, which the axis `expert` divides between workers.

    python examples/mixture.py
    rankless run --mesh expert=2 examples/mixture.py
    rankless run --mesh data=2,expert=2 examples/mixture.py --experts 8
    rankless run --mesh expert=2,tensor=2 examples/mixture.py

Each token uses two experts. An expert has so many slots per window; tokens that find no slot are left out, and counted.
A loss keeps the experts equally busy. The model and the loop are those of one device, and all of these print the same
losses, up to the rounding of float32. A run continues from the checkpoint of another one, on any other mesh.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data
from torch import nn

import rankless

CONTEXT = 64
CHARACTERS = 128


class Experts(nn.Module):
    def __init__(self, experts, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, inputs):  # experts, windows, slots, width
        hidden = F.gelu(torch.einsum("ewsd,edh->ewsh", inputs, self.up))
        return torch.einsum("ewsh,ehd->ewsd", hidden, self.down)


class Mixture(nn.Module):
    def __init__(self, experts, width, capacity):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, 4 * width)
        self.slots = int(capacity * 2 * CONTEXT / experts)

    def forward(self, hidden):
        chances = self.router(hidden).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        masks = F.one_hot(chosen, chances.shape[-1])  # windows, tokens, choices, experts
        # Count how many tokens before this one have chosen the same expert: first choices first, then second ones.
        ordered = masks.transpose(1, 2).flatten(1, 2)
        before = (ordered.cumsum(1) - ordered).view(masks.transpose(1, 2).shape).transpose(1, 2)
        position = (before * masks).sum(-1)  # windows, tokens, choices
        slots = F.one_hot(position.clamp(max=self.slots), self.slots + 1)[..., : self.slots]
        places = masks.unsqueeze(-1) * slots.unsqueeze(-2)  # windows, tokens, choices, experts, slots
        inputs = torch.einsum("wtes,wtd->ewsd", places.sum(2).to(hidden.dtype), hidden)
        combined = torch.einsum("wtkes,wtk->wtes", places.to(hidden.dtype), weights)
        results = torch.einsum("wtes,ewsd->wtd", combined, self.experts(inputs))
        balance = chances.shape[-1] * (masks.to(hidden.dtype).mean((0, 1, 2)) * chances.mean((0, 1))).sum()
        left_out = (position >= self.slots).to(hidden.dtype).mean()
        return results, balance, left_out


class Block(nn.Module):
    def __init__(self, experts, width, heads, capacity):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mixture_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Mixture(experts, width, capacity)

    def forward(self, hidden):
        rows, length, width = hidden.shape
        parts = self.query_key_value(self.attention_norm(hidden)).split(width, dim=2)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(rows, length, width))
        results, balance, left_out = self.mixture(self.mixture_norm(hidden))
        return hidden + results, balance, left_out


class Model(nn.Module):
    def __init__(self, experts, layers=2, width=64, heads=4, capacity=1.25):
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(experts, width, heads, capacity) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, text):
        hidden = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        balance = left_out = 0.0
        for block in self.blocks:
            hidden, term, share = block(hidden)
            balance, left_out = balance + term, left_out + share / len(self.blocks)
        return self.output(self.norm(hidden)), balance, left_out


def read_windows():
    """Return windows of the source of the standard library, each with the window shifted by one character."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files).encode("ascii", errors="replace")
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    count = (len(codes) - 1) // CONTEXT
    inputs, following = codes[: count * CONTEXT], codes[1 : count * CONTEXT + 1]
    return torch.utils.data.TensorDataset(inputs.view(count, CONTEXT), following.view(count, CONTEXT))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--experts", type=int, default=4)
parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint after the last step")
parser.add_argument("--load", metavar="FOLDER", help="continue from a checkpoint")
arguments = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Model(arguments.experts).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@rankless.job(model=model, optimizer=optimizer, clip_norm=1.0)
def train(text, following):
    logits, balance, left_out = model(text)
    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
    return loss + 0.01 * balance, loss, left_out


loader = rankless.loader(read_windows(), batch_size=16, shuffle=True, seed=0)
saved = {"model": model, "optimizer": optimizer, "loader": loader}
if arguments.load:
    rankless.load(arguments.load, **saved)
for step, (text, following) in enumerate(loader, start=1):
    _, loss, left_out = train(text.to(device), following.to(device))
    if step % 10 == 0 or step == arguments.steps:
        print(f"step {step}: loss {loss.item():.4f}, {left_out.item():.1%} of the tokens' choices left out")
    if step == arguments.steps:
        break
if arguments.save:
    rankless.save(arguments.save, **saved, layout="sharded")
