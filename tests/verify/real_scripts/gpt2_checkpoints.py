"""GPT-2 from a configuration with dropout and activation checkpoints, trained on arithmetic sequences."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rankless

torch.manual_seed(0)
config = GPT2Config(n_layer=3, n_head=2, n_embd=32, vocab_size=64, n_positions=16, use_cache=False)
model = GPT2LMHeadModel(config)
model.gradient_checkpointing_enable()
start, stride = torch.randint(0, 64, (37, 1)), torch.randint(1, 5, (37, 1))
data = torch.utils.data.TensorDataset((start + stride * torch.arange(16)) % 64)
loader = rankless.loader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@rankless.job(model=model, optimizer=optimizer, clip_norm=1.0)
def train(tokens):
    return model(input_ids=tokens, labels=tokens).loss


for epoch in range(2):
    total = 0.0
    for (tokens,) in loader:
        total += train(tokens).item()
    print(f"epoch {epoch + 1}: mean loss {total / len(loader):.5f}")
