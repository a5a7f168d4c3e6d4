"""A character-level GPT for any mesh: data, tensor, pipeline and sequence parallelism, ZeRO and recomputation.

    python examples/gpt_hybrid.py
    rankless run --mesh data=2,tensor=2,pipeline=2 examples/gpt_hybrid.py --schedule 1f1b
    rankless run --mesh data=2,tensor=2 examples/gpt_hybrid.py --zero parameters --sequence-parallel
    rankless run --mesh data=2,sequence=2 examples/gpt_hybrid.py --recompute 1.0

The model and the loop are those of one device. All of these print the same losses, up to the rounding of float32. A run
continues from the checkpoint of another one, on any other mesh.
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


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        rows, length, width = hidden.shape
        parts = self.query_key_value(self.attention_norm(hidden)).split(width, dim=2)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.projection(attended.transpose(1, 2).reshape(rows, length, width)))
        return hidden + self.dropout(self.feed(self.feed_norm(hidden)))


class GPT(nn.Module):
    def __init__(self, layers, width=96, heads=4):
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CHARACTERS, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.output.weight = self.characters.weight

    def forward(self, text):
        hidden = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.output(self.norm(self.blocks(hidden)))


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
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--schedule", choices=["gpipe", "1f1b", "interleaved", "zero-bubble"], default="1f1b")
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--zero", choices=["optimizer", "gradients", "parameters"])
parser.add_argument("--recompute", type=float)
parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint after the last step")
parser.add_argument("--load", metavar="FOLDER", help="continue from a checkpoint")
arguments = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = GPT(arguments.layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
loader = rankless.loader(read_windows(), batch_size=16, shuffle=True, seed=0)


@rankless.job(
    model=model,
    optimizer=optimizer,
    clip_norm=1.0,
    zero=arguments.zero,
    recompute=arguments.recompute,
    plan=rankless.Plan(schedule=arguments.schedule, sequence_parallel=arguments.sequence_parallel),
)
def train(text, following):
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


saved = {"model": model, "optimizer": optimizer, "loader": loader}
if arguments.load:
    rankless.load(arguments.load, **saved)
for step, (text, following) in enumerate(loader, start=1):
    loss = train(text.to(device), following.to(device))
    if step % 10 == 0 or step == arguments.steps:
        print(f"step {step}: loss {loss.item():.4f}, norm of the gradient {train.gradient_norm.item():.3f}")
    if step == arguments.steps:
        break
if arguments.save:
    rankless.save(arguments.save, **saved, layout="sharded")
