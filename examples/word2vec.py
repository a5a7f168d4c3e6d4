"""Vectors of words by skip-gram with negative sampling, on the source of Python's standard library.

    python examples/word2vec.py
    rankless run -n 3 examples/word2vec.py
    rankless run --servers 2 --workers 3 examples/word2vec.py

The id of a word is a hash of 64 bits. Python's own `hash` would give each worker other numbers. A word has a row in the
table of centers and one in the table of contexts. A sample is a center with the words around it. At the ends of the
text, the id 0 stands for words that are missing. Every step draws other words, on each worker the same ones. All
commands print the same numbers, up to rounding.
"""

import argparse
import collections
import hashlib
import json
import re
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data
from torch import nn

import rankless

WINDOW = 3
NEGATIVES = 5  # for each context


class SkipGram(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        initial = rankless.parameter_server.Normal(std=0.1)
        self.centers = rankless.parameter_server.Embedding(dim, initial=initial)
        self.contexts = rankless.parameter_server.Embedding(dim, initial=initial, padding_idx=0)

    def forward(self, centers, contexts, others):
        """Return the mean over contexts of their cross entropy and that of as many words times NEGATIVES."""
        centers = self.centers(centers)
        positive = torch.einsum("rd,rcd->rc", centers, self.contexts(contexts))
        negative = torch.einsum("rd,nd->rn", centers, self.contexts(others))
        is_word = (contexts != 0).to(positive.dtype)
        counts = is_word.sum(1)
        terms = (F.softplus(-positive) * is_word).sum(1) + NEGATIVES * counts * F.softplus(negative).mean(1)
        return terms.sum() / counts.sum()


def hash_word(word):
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)


def read_words(files):
    """Return the words of the first files of the standard library, one after the other."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:files]
    return [word for path in paths for word in re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--files", type=int, help="files of the standard library to read; default: all")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
parser.add_argument("--report", metavar="FILE", help="write losses and neighbors as JSON")
arguments = parser.parse_args()

torch.manual_seed(arguments.seed)
torch.set_default_dtype(getattr(torch, arguments.dtype))
device = "cuda" if torch.cuda.is_available() else "cpu"
text = read_words(arguments.files)
counts = collections.Counter(text)
vocabulary = sorted(counts)
numbers = {word: number for number, word in enumerate(vocabulary)}
ids = torch.tensor([hash_word(word) for word in vocabulary])
occurrences = torch.tensor([counts[word] for word in vocabulary], dtype=torch.float64)
encoded = torch.tensor([numbers[word] for word in text])
# Leave out most occurrences of frequent words, as the authors of word2vec do.
chances = (1e-3 * len(text) / occurrences).sqrt().clamp(max=1)
encoded = encoded[torch.rand(len(encoded), dtype=torch.float64) < chances[encoded]]
padded = F.pad(ids[encoded], (WINDOW, WINDOW))
windows = padded.unfold(0, 2 * WINDOW + 1, 1)
around = torch.cat([windows[:, :WINDOW], windows[:, WINDOW + 1 :]], dim=1)
data = torch.utils.data.TensorDataset(windows[:, WINDOW], around)
loader = rankless.loader(data, batch_size=arguments.batch_size, shuffle=True, seed=arguments.seed)
print(f"{len(text):,} words, {len(vocabulary):,} different ones, {len(data):,} samples")

model = SkipGram().to(device)
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)


@rankless.job(model=model, optimizer=optimizer)
def train(centers, contexts, others):
    return model(centers, contexts, others)


report = {"losses": [], "neighbors": {}}
for epoch in range(arguments.epochs):
    total = 0.0
    for centers, contexts in loader:
        others = ids[torch.multinomial(occurrences**0.75, 64, replacement=True)]
        loss = train(centers.to(device), contexts.to(device), others.to(device))
        total += loss.item() * len(centers)
    report["losses"].append(total / len(data))
    print(f"epoch {epoch + 1}: loss {report['losses'][-1]:.4f}")

frequent = torch.nonzero(occurrences >= 20).flatten()
with torch.no_grad():
    vectors = F.normalize(model.centers(ids[frequent].to(device)), dim=1)
words = [vocabulary[number] for number in frequent]
for word in ("self", "return", "error", "int", "True", "path"):
    if word in words:
        similar = vectors @ vectors[words.index(word)]
        report["neighbors"][word] = [words[place] for place in similar.topk(min(6, len(words))).indices[1:]]
        print(f"{word}: {', '.join(report['neighbors'][word])}")
if arguments.report:
    rankless.once(Path(arguments.report).write_text, json.dumps(report))
