"""A character-level GPT on Python's own source: `plain_gpt.py` for one device, `gpt.py` the same with Rankless."""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data
from torch import nn
import rankless

CONTEXT = 64
CHARACTERS = 128


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        rows, length, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        mixed = mixed.view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.dropout(self.projection(attended))
        return hidden + self.dropout(self.feed(self.feed_norm(hidden)))


class GPT(nn.Module):
    def __init__(self, layers, width=96, heads=4):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CHARACTERS, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.output.weight = self.characters.weight

    def forward(self, text):
        positions = torch.arange(text.shape[1], device=text.device)
        hidden = self.characters(text) + self.positions(positions)
        return self.output(self.norm(self.blocks(hidden)))


class Windows(torch.utils.data.Dataset):
    """Windows of a text, each with the window shifted by one character as its target."""

    def __init__(self, text):
        self.text = text

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        start = index * CONTEXT
        return self.text[start : start + CONTEXT], self.text[start + 1 : start + CONTEXT + 1]


def read_library():
    """Return the source of the standard library as ASCII codes: nine tenths to train on, a tenth to validate."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    codes = torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8).long()
    return codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=2)
arguments = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_text, validation_text = read_library()
validation = torch.utils.data.default_collate([Windows(validation_text)[index * 37] for index in range(128)])
model = GPT(arguments.layers).to(device)
weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(2, arguments.steps))
loader = rankless.loader(Windows(train_text), batch_size=32, shuffle=True, seed=0)


@rankless.job(model=model, optimizer=optimizer)
def train(text, following):
    loss = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
    return loss


@rankless.job(model=model)
def evaluate(text, following):
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


model.train()
for step, (text, following) in enumerate(loader, start=1):
    loss = train(text.to(device), following.to(device))
    scheduler.step()
    if step % 20 == 0 or step == arguments.steps:
        print(f"step {step}: loss {loss.item():.4f}")
    if step == arguments.steps:
        break
model.eval()
bits = evaluate(*[part.to(device) for part in validation]).item() / math.log(2)
print(f"validation: {bits:.3f} bits per character")
