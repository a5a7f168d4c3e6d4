"""A decoder-only transformer on functions of the standard library, in padded batches of like lengths."""

import argparse
import ast
import math
import random
import sysconfig
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler

import rankless

PAD, BOS, EOS, VOCABULARY = 128, 129, 130, 131
IGNORE = -100


class Functions(Dataset):
    def __init__(self, texts):
        self.samples = [[BOS, *text.encode("ascii", "replace"), EOS] for text in texts]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.tensor(self.samples[index], dtype=torch.long)


def read_functions(max_length, limit):
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node)
                if text and 10 < len(text) <= max_length - 2:
                    texts.append(text)
        if limit and len(texts) >= limit:
            break
    texts = texts[: limit or None]
    random.Random(0).shuffle(texts)
    return texts[len(texts) // 10 :], texts[: len(texts) // 10]


class BucketSampler(Sampler):
    """Shuffles, then sorts pools of some batches by length, so that batches need little padding."""

    def __init__(self, dataset, batch_size, pool=8, seed=0):
        self.lengths = [len(sample) for sample in dataset.samples]
        self.batch_size = batch_size
        self.pool = pool
        self.rng = random.Random(seed)

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        indices = list(range(len(self.lengths)))
        self.rng.shuffle(indices)
        size = self.batch_size * self.pool
        pools = [sorted(indices[i : i + size], key=lambda j: self.lengths[j]) for i in range(0, len(indices), size)]
        batches = [pool[i : i + self.batch_size] for pool in pools for i in range(0, len(pool), self.batch_size)]
        last = [batches.pop()] if len(batches[-1]) < self.batch_size else []
        self.rng.shuffle(batches)
        return iter([index for batch in batches + last for index in batch])


def collate(samples):
    longest = max(len(sample) for sample in samples)
    ids = torch.full((len(samples), longest), PAD)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
    input_ids, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[labels == PAD] = IGNORE
    return {"input_ids": input_ids, "attention_mask": input_ids != PAD, "labels": labels}


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout, max_len):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class TransformerLM(nn.Module):
    def __init__(self, d_model, nhead, nlayers, max_len, dropout=0.1):
        super().__init__()
        self.d_model = d_model
        self.embed = nn.Embedding(VOCABULARY, d_model, padding_idx=PAD)
        self.pos = PositionalEncoding(d_model, dropout, max_len)
        layer = nn.TransformerEncoderLayer(
            d_model, nhead, 4 * d_model, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, nlayers, norm=nn.LayerNorm(d_model), enable_nested_tensor=False)
        self.decoder = nn.Linear(d_model, VOCABULARY)

    def forward(self, input_ids, attention_mask):
        length = input_ids.size(1)
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool, device=input_ids.device), diagonal=1)
        x = self.pos(self.embed(input_ids) * math.sqrt(self.d_model))
        x = self.encoder(x, mask=causal, src_key_padding_mask=~attention_mask, is_causal=True)
        return self.decoder(x)


def groups_of(iterable, size):
    iterator = iter(iterable)
    while group := list(islice(iterator, size)):
        yield group


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--limit", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_texts, valid_texts = read_functions(args.max_length, args.limit)
    train_set, valid_set = Functions(train_texts), Functions(valid_texts)
    sampler = BucketSampler(train_set, args.batch_size)
    train_loader = rankless.loader(
        train_set, batch_size=args.batch_size, sampler=sampler, collate_fn=collate, reading="replicated"
    )
    valid_loader = rankless.loader(valid_set, batch_size=args.batch_size, collate_fn=collate, reading="replicated")

    model = TransformerLM(args.d_model, 4, args.layers, args.max_length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / args.warmup, (args.warmup / (step + 1)) ** 0.5)
    )

    def compute_loss(batch, reduction):
        logits = model(batch["input_ids"], batch["attention_mask"])
        labels = batch["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE, reduction=reduction)

    @rankless.job(model=model, optimizer=optimizer, accumulate=args.accumulate, clip_norm=args.clip)
    def train(batch):
        return compute_loss(batch, reduction="mean")

    def train_group(group):
        losses = [train(batch).item() for batch in group]
        train.flush()  # the last group may be a short one
        return losses

    @rankless.job(model=model)
    def evaluate(batch):
        return compute_loss(batch, reduction="sum")

    step, start = 0, time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for group in groups_of(train_loader, args.accumulate):
            group = [{key: value.to(device) for key, value in batch.items()} for batch in group]
            losses = train_group(group)
            step += 1
            if step % 5 == 0:
                shapes = [tuple(batch["labels"].shape) for batch in group]
                print(f"step {step}: loss {sum(losses) / len(losses):.6f} lr {scheduler.get_last_lr()[0]:.6f} {shapes}")
            scheduler.step()
            if step == args.max_steps:
                break
        model.eval()
        total, count = 0.0, 0
        for batch in valid_loader:
            batch = {key: value.to(device) for key, value in batch.items()}
            total += evaluate(batch).item()
            count += (batch["labels"] != IGNORE).sum().item()
        print(f"epoch {epoch}: perplexity {math.exp(total / count):.5f} over {count} characters")
        if step == args.max_steps:
            break
    print(f"{step / (time.perf_counter() - start):.2f} steps/s", flush=True)


if __name__ == "__main__":
    main()
