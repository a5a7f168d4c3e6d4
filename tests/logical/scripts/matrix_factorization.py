import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.RandomState(17)
N_USERS, N_ITEMS, DIM = 40, 30, 4
true_u, true_i = rng.randn(N_USERS, DIM), rng.randn(N_ITEMS, DIM)
pairs = rng.permutation(N_USERS * N_ITEMS)[:620]
users, items = pairs // N_ITEMS, pairs % N_ITEMS
ratings = np.clip(3 + (true_u[users] * true_i[items]).sum(1) * 0.6 + 0.1 * rng.randn(len(pairs)), 1, 5)


class Ratings(Dataset):
    def __init__(self, part):
        self.users = torch.LongTensor(users[part])
        self.items = torch.LongTensor(items[part])
        self.ratings = torch.FloatTensor(ratings[part])

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, idx):
        return self.users[idx], self.items[idx], self.ratings[idx]


class MF(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.user_emb = nn.Embedding(N_USERS, DIM, sparse=sparse)
        self.item_emb = nn.Embedding(N_ITEMS, DIM, sparse=sparse)
        self.user_bias = nn.Embedding(N_USERS, 1, sparse=sparse)
        self.item_bias = nn.Embedding(N_ITEMS, 1, sparse=sparse)
        self.offset = 3.0
        for emb in (self.user_emb, self.item_emb):
            nn.init.normal_(emb.weight, std=0.1)
        for emb in (self.user_bias, self.item_bias):
            nn.init.zeros_(emb.weight)

    def forward(self, u, i):
        dot = (self.user_emb(u) * self.item_emb(i)).sum(1)
        return dot + self.user_bias(u).squeeze() + self.item_bias(i).squeeze() + self.offset


def fit(sparse):
    torch.manual_seed(17)
    model = MF(sparse)
    if sparse:
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
    else:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=1e-5)
    train_loader = DataLoader(Ratings(slice(0, 500)), batch_size=64, shuffle=True)
    test_loader = DataLoader(Ratings(slice(500, None)), batch_size=64)
    for epoch in range(3):
        losses = []
        for u, i, r in train_loader:
            loss = nn.functional.mse_loss(model(u, i), r)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            sq = torch.cat([(model(u, i) - r) ** 2 for u, i, r in test_loader])
        print(f"sparse={sparse} epoch {epoch} train {np.mean(losses):.12f} test RMSE {sq.mean().sqrt().item():.12f}")
    return model


for sparse in (True, False):
    model = fit(sparse)
    user = torch.tensor([3])
    scores = model(user.expand(N_ITEMS), torch.arange(N_ITEMS))
    print("top items of user 3:", scores.topk(5).indices.tolist(), scores.max().item())
    print("checksum", model.user_emb.weight.abs().sum().item(), model.item_emb.weight.abs().sum().item())
