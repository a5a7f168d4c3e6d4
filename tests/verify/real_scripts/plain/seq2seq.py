"""A sequence-to-sequence model with attention that reverses words, with teacher forcing in half of the steps."""

import random

import torch
from torch import nn

PAD, START, END = 0, 1, 2


class Encoder(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary, width, padding_idx=PAD), nn.Dropout(0.1)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, source):
        return self.gru(self.dropout(self.embedding(source)))


class BahdanauAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, query, keys, mask):
        scores = self.score(torch.tanh(self.query(query) + self.key(keys))).squeeze(2).unsqueeze(1)
        weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(dim=-1)
        return torch.bmm(weights, keys)


class Decoder(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary, width, padding_idx=PAD), nn.Dropout(0.1)
        self.attention, self.out = BahdanauAttention(width), nn.Linear(width, vocabulary)
        self.gru = nn.GRU(2 * width, width, batch_first=True)

    def forward(self, keys, hidden, mask, target, teacher_forcing):
        token = torch.full((keys.size(0), 1), START, dtype=torch.long)
        outputs = []
        for step in range(target.size(1)):
            context = self.attention(hidden.permute(1, 0, 2), keys, mask)
            output, hidden = self.gru(torch.cat([self.dropout(self.embedding(token)), context], dim=2), hidden)
            outputs.append(self.out(output))
            if teacher_forcing:
                token = target[:, step].unsqueeze(1)
            else:
                token = outputs[-1].topk(1).indices.squeeze(-1).detach()
        return torch.cat(outputs, dim=1)


random.seed(0)
torch.manual_seed(0)
lengths = torch.randint(2, 7, (92,))
positions = torch.arange(7)
source = torch.randint(3, 14, (92, 7)).masked_fill(positions >= lengths[:, None], PAD)
reverse = source.gather(1, (lengths[:, None] - 1 - positions).clamp(min=0))
target = reverse.masked_fill(positions > lengths[:, None], PAD).masked_fill(positions == lengths[:, None], END)
data = torch.utils.data.TensorDataset(source, target)
loader = torch.utils.data.DataLoader(data, batch_size=24, shuffle=True)
encoder, decoder = Encoder(14, 32), Decoder(14, 32)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)


def train(source, target, teacher_forcing):
    keys, hidden = encoder(source)
    logits = decoder(keys, hidden, source != PAD, target, teacher_forcing)
    loss = criterion(logits.reshape(-1, logits.size(-1)), target.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 1.0)
    optimizer.step()
    return loss


@torch.no_grad()
def count_right(source, target):
    keys, hidden = encoder(source)
    found = decoder(keys, hidden, source != PAD, target, False).argmax(dim=-1)
    return ((found == target) & (target != PAD)).sum()


for epoch in range(2):
    encoder.train(), decoder.train()
    for source_batch, target_batch in loader:
        loss = train(source_batch, target_batch, random.random() < 0.5)
    encoder.eval(), decoder.eval()
    right = count_right(source, target).item()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {right} of {int((target != PAD).sum())} tokens right")
