"""A small transformer learns to continue sequences, with float16 compression and several backward passes per step."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
args = parser.parse_args()

WORDS, LENGTH, WIDTH = 32, 24, 64

hvd.init()
torch.manual_seed(0)
verbose = hvd.rank() == 0


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        length = tokens.shape[1]
        hidden = self.words(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.output(self.layers(hidden, mask=mask, is_causal=True))


def batch(step, part):
    """Sequences that rise in different steps, and differ on each process."""
    seed = (step * args.batches_per_allreduce + part) * hvd.size() + hvd.rank()
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(WORDS, (args.batch_size, 1), generator=generator)
    stride = torch.randint(1, 4, (args.batch_size, 1), generator=generator)
    sequence = (start + stride * torch.arange(LENGTH + 1)) % WORDS
    return sequence[:, :-1], sequence[:, 1:]


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)

for step in range(args.steps):
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in range(args.batches_per_allreduce):
        inputs, targets = batch(step, part)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss = loss / args.batches_per_allreduce
        loss.backward()
        total += loss.detach()
    # Clipping needs the reduced gradients of all processes.
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    average = hvd.allreduce(total, name="loss")
    if verbose and (step % 10 == 0 or step == args.steps - 1):
        print(f"step {step}: loss {average.item():.4f}", flush=True)
