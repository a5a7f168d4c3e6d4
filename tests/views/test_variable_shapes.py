"""Jobs whose batches vary in rows and length: exact on workers, and captured a few times only."""

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, sampled
from torch import nn

WORDS = 13
WIDTH = 8
LENGTHS = (6, 9, 4, 11, 7, 6, 13, 5, 8, 12, 3, 10, 2, 9, 14, 1, 7, 5)


class Block(nn.Module):
    """Causal attention with padding hidden, and a feed-forward layer."""

    def __init__(self, dropout):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mixed, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, seen):
        rows, length, _ = hidden.shape
        query, key, value = self.mixed(self.norms[0](hidden)).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mask = seen[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.dropout(self.projection(attended.transpose(1, 2).reshape(rows, length, -1)))
        return hidden + self.dropout(self.feed(self.norms[1](hidden)))


class LanguageModel(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        seen = words != 0
        hidden = self.words(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.output(hidden)


def trained(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def text(rows, length=None):
    """Words after a first one, padded with zeros at their end; of a length of its own."""
    length = LENGTHS[int(torch.randint(len(LENGTHS), ()))] if length is None else length
    words = torch.randint(1, WORDS, (rows, length))
    padded = torch.arange(length) >= torch.randint(1, length + 1, (rows, 1))
    return {"words": words.masked_fill(padded, 0)}


def language_model(dropout=0.0):
    model = LanguageModel(dropout)

    def loss(words):
        scores = model(words)
        return F.cross_entropy(scores.flatten(0, 1), words.flatten(), ignore_index=0), scores.argmax(-1)

    return trained(model, loss)


def language_model_with_dropout():
    return language_model(0.2)


SCENARIOS = [
    Scenario(build=language_model, batch=text, rows=(7,) * 9 + (5,) + (6, 8, 7, 4, 9, 7, 5, 1)),
    Scenario(build=language_model_with_dropout, batch=text, rows=(7,) * 9 + (5,) + (6, 8, 7, 4, 9, 7, 5, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sampled(SCENARIOS, 2, 3, every_size=True))
def test_batches_of_varying_rows_and_length_are_trained_exactly(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)
