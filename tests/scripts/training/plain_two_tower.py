"""Learn to find a function by its docstring: two encoders, trained contrastively on the standard library."""

import argparse
import ast
import copy
import re
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

BUCKETS = 4096
NAME_LENGTH, TEXT_LENGTH = 24, 96


def library_pairs(limit):
    """(name, first line of the docstring) of documented functions of the standard library."""
    pairs = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                doc = ast.get_docstring(node)
                if doc and len(doc) > 20:
                    pairs.setdefault(node.name, doc.splitlines()[0])
        if limit and len(pairs) >= limit:
            break
    return sorted(pairs.items())


def hash_trigram(gram):
    value = 0
    for character in gram:
        value = (value * 131 + ord(character)) % (BUCKETS - 1)
    return value + 1  # 0 is for padding


def encode_text(text, length):
    text = f" {re.sub(r'[^a-z]+', ' ', text.lower())} "
    ids = [hash_trigram(text[i : i + 3]) for i in range(len(text) - 2)][:length]
    return torch.tensor(ids + [0] * (length - len(ids)))


class PairDataset(Dataset):
    def __init__(self, pairs):
        self.items = [(encode_text(name, NAME_LENGTH), encode_text(doc, TEXT_LENGTH)) for name, doc in pairs]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        name, text = self.items[index]
        return {"name": name, "text": text}


class Tower(nn.Module):
    def __init__(self, embedding, dim, dropout):
        super().__init__()
        self.embedding = embedding
        self.project = nn.Sequential(
            nn.Linear(embedding.embedding_dim, 2 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * dim, dim)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1)
        pooled = (self.embedding(ids) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return F.normalize(self.norm(self.project(pooled)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, dim=64, dropout=0.1):
        super().__init__()
        shared = nn.Embedding(BUCKETS, dim, padding_idx=0)
        self.names = Tower(shared, dim, dropout)
        self.texts = Tower(shared, dim, dropout)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        return self.names(batch["name"]), self.texts(batch["text"])


def contrastive_loss(model, batch):
    names, texts = model(batch)
    logits = model.logit_scale.exp().clamp(max=100) * names @ texts.t()
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def recall_at(names, texts, ks=(1, 5, 10)):
    similarity = texts @ names.t()
    ranks = (similarity > similarity.diagonal().unsqueeze(1)).sum(dim=1)
    return {k: (ranks < k).float().mean().item() for k in ks}


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = -float("inf")
        self.bad_epochs = 0
        self.state = None

    def step(self, metric, model):
        if metric > self.best:
            self.best, self.bad_epochs = metric, 0
            self.state = copy.deepcopy(model.state_dict())
        else:
            self.bad_epochs += 1
        return self.bad_epochs > self.patience


def to_device(batch, device):
    return {key: value.to(device) for key, value in batch.items()}


def main(args):
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs = library_pairs(args.limit)
    order = torch.randperm(len(pairs)).tolist()
    pairs = [pairs[i] for i in order][: args.limit or None]
    cut = len(pairs) // 5
    train_loader = DataLoader(PairDataset(pairs[cut:]), batch_size=args.batch_size, shuffle=True)
    valid_loader = DataLoader(PairDataset(pairs[:cut]), batch_size=256)

    model = TwoTower().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    def train_step(batch):
        loss = contrastive_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @torch.no_grad()
    def embed(batch):
        return model(batch)

    @torch.no_grad()
    def embed_ema(batch):
        return ema(batch)

    def evaluate(network, encode):
        network.eval()
        encoded = [encode(to_device(batch, device)) for batch in valid_loader]
        names, texts = (torch.cat(part) for part in zip(*encoded, strict=True))
        return recall_at(names, texts)

    stopping = EarlyStopping(args.patience)
    for epoch in range(1, args.epochs + 1):
        model.train()
        running, count = 0.0, 0
        for batch in train_loader:
            loss = train_step(to_device(batch, device))
            ema.update_parameters(model)
            running += loss.item() * len(batch["name"])
            count += len(batch["name"])
        recall, averaged = evaluate(model, embed), evaluate(ema, embed_ema)
        print(f"epoch {epoch:2d} | loss {running / count:.5f} | scale {model.logit_scale.exp().item():.4f}", end=" | ")
        print(*(f"R@{k} {recall[k]:.4f} (ema {averaged[k]:.4f})" for k in recall))
        if stopping.step(averaged[5], ema):
            print(f"no better for {args.patience + 1} epochs: stopped")
            break
    ema.load_state_dict(stopping.state)
    final = evaluate(ema, embed_ema)
    print(f"restored: R@5 {final[5]:.4f}")
    assert final[5] == stopping.best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
