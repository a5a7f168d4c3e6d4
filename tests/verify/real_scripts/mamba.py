"""Mamba from a configuration: a state-space model that continues sequences of numbers."""

import torch
from transformers import MambaConfig, MambaForCausalLM

import rankless

torch.manual_seed(0)
config = MambaConfig(
    vocab_size=64, hidden_size=24, state_size=8, num_hidden_layers=2, conv_kernel=4, expand=2, use_cache=False
)
model = MambaForCausalLM(config)
start, stride = torch.randint(0, 64, (27, 1)), torch.randint(1, 6, (27, 1))
data = torch.utils.data.TensorDataset((start + stride * torch.arange(10)) % 64)
loader = rankless.loader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


@rankless.job(model=model, optimizer=optimizer, clip_norm=1.0)
def train(input_ids):
    return model(input_ids=input_ids, labels=input_ids).loss


for epoch in range(2):
    for (input_ids,) in loader:
        loss = train(input_ids)
    print(f"epoch {epoch + 1}: loss {loss.item():.5f}")
