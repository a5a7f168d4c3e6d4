"""A small GPT with tied embeddings, accumulated steps, a warm-up schedule and two parameter groups."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 24), nn.Embedding(12, 24)
        self.attend, self.first = nn.Linear(24, 72), nn.LayerNorm(24)
        self.mix, self.last = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), nn.LayerNorm(24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        query, key, value = self.attend(self.first(hidden)).chunk(3, dim=2)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(self.last(hidden + F.dropout(self.mix(hidden), 0.1, self.training)))


model = Gpt()
decayed = [item for item in model.parameters() if item.dim() > 1]
plain = [item for item in model.parameters() if item.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
data = torch.utils.data.TensorDataset(torch.randint(0, 40, (44, 13)))


@rankless.job(model=model, optimizer=optimizer, accumulate=2, clip_norm=1.0)
def train(tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


for _epoch in range(3):
    for (tokens,) in rankless.loader(data, batch_size=8, shuffle=True, seed=2):
        print(train(tokens).item())
        if train.stepped:
            scheduler.step()
