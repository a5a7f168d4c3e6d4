"""Text classification: batches of similar lengths, from a batch sampler of our own."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

random.seed(12)
torch.manual_seed(12)
POSITIVE, NEGATIVE = ["good", "great", "fine", "happy"], ["bad", "awful", "poor", "sad"]
FILLER = ["the", "film", "was", "and", "a", "story", "with", "some", "very", "actors"]
VOCAB = {w: i + 1 for i, w in enumerate(POSITIVE + NEGATIVE + FILLER)}


def make_sentence():
    label = random.randint(0, 1)
    words = random.choices(FILLER, k=random.randint(3, 12))
    for _ in range(2):
        words.insert(random.randrange(len(words)), random.choice(POSITIVE if label else NEGATIVE))
    return [VOCAB[w] for w in words], label


class TextDataset(Dataset):
    def __init__(self, n):
        self.samples = [make_sentence() for _ in range(n)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


class BucketBatchSampler(Sampler):
    def __init__(self, lengths, batch_size, shuffle=True):
        self.lengths, self.batch_size, self.shuffle = lengths, batch_size, shuffle

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], i))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if self.shuffle:
            random.shuffle(batches)
        yield from batches

    def __len__(self):
        return (len(self.lengths) + self.batch_size - 1) // self.batch_size


def collate(batch):
    tokens, labels = zip(*batch)
    lengths = torch.tensor([len(t) for t in tokens])
    return pad_sequence([torch.tensor(t) for t in tokens], batch_first=True), lengths, torch.tensor(labels).float()


class Attention(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB) + 1, dim, padding_idx=0)
        self.score = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, 1)

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        mask = torch.arange(tokens.size(1))[None, :] >= lengths[:, None]
        weights = self.score(x).squeeze(-1).masked_fill(mask, float("-inf")).softmax(dim=-1)
        return self.out((weights.unsqueeze(-1) * x).sum(dim=1)).squeeze(-1)


train_set, test_set = TextDataset(170), TextDataset(40)
sampler = BucketBatchSampler([len(t) for t, _ in train_set.samples], batch_size=24)
train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
test_loader = DataLoader(test_set, batch_size=20, collate_fn=collate)
model = Attention()
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(2):
    model.train()
    for tokens, lengths, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(tokens, lengths), labels)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} {len(labels)} x {tokens.shape[1]} loss {loss.item():.12f}")
    model.eval()
    with torch.no_grad():
        correct = sum(((model(t, n) > 0) == y.bool()).sum().item() for t, n, y in test_loader)
    print(f"epoch {epoch} accuracy {correct}/{len(test_set)}")
print("checksum", sum(p.pow(2).sum().item() for p in model.parameters()))
