"""Jobs whose batches vary in rows and length: exact on workers, and captured only a few times."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, call_with_batch, sample_cases
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.programs import program_cache

WORDS = 13
WIDTH = 8
LENGTHS = (6, 9, 4, 11, 7, 6, 13, 5, 8, 12, 3, 10, 2, 9, 14, 1, 7, 5)


class Block(nn.Module):
    """Causal attention with masked padding, and a feed-forward layer."""

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
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(208, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout)])
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        seen = words != 0
        hidden = self.words(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.output(hidden)


def make_script(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def text(rows, length=None):
    """Random words with an initial word, padded with zeros to a random length."""
    length = LENGTHS[int(torch.randint(len(LENGTHS), ()))] if length is None else length
    words = torch.randint(1, WORDS, (rows, length))
    padded = torch.arange(length) >= torch.randint(1, length + 1, (rows, 1))
    return {"words": words.masked_fill(padded, 0)}


def language_model(dropout=0.0):
    model = LanguageModel(dropout)

    def loss(words):
        scores = model(words)
        return F.cross_entropy(scores.flatten(0, 1), words.flatten(), ignore_index=0), scores.argmax(-1)

    return make_script(model, loss)


def language_model_with_dropout():
    return language_model(0.2)


def sequences(rows):
    length = LENGTHS[int(torch.randint(len(LENGTHS), ()))] + 1
    return torch.randn(rows, length, 4), torch.randint(3, (rows,))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.output = nn.Linear(10, 3)

    def forward(self, x):
        states, (last, _) = self.recurrent(x)
        return self.output(states.mean(1) + torch.cat([last[-1], last[-2]], 1))


def recurrent():
    model = Recurrent()
    return make_script(model, lambda x, labels: F.cross_entropy(model(x), labels))


def normalised_convolutions():
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
    head = nn.Linear(6, 3)
    script = make_script(nn.ModuleDict({"body": model, "head": head}), lambda x, labels: loss(x, labels))

    def loss(x, labels):
        scores = head(model(x.transpose(1, 2)).mean(2))
        return {"loss": F.cross_entropy(scores, labels), "rows": x.shape[0], "length": x.shape[1] / 2}

    return script


def encoder_with_padding():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {"body": nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "head": nn.Linear(4, 3)}
    )

    def loss(x, labels):
        padding = torch.arange(x.shape[1]) > labels[:, None]
        hidden = model["body"](x, src_key_padding_mask=padding)
        kept = hidden.masked_fill(padding[..., None], 0.0).sum(1) / (~padding).sum(1, keepdim=True)
        return F.cross_entropy(model["head"](kept), labels, label_smoothing=0.1)

    return make_script(model, loss)


def contrastive():
    towers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(5, 6)])
    temperature = nn.Parameter(torch.tensor(1.0))
    towers.register_parameter("temperature", temperature)

    def loss(left, right):
        one, other = F.normalize(towers[0](left), dim=1), F.normalize(towers[1](right), dim=1)
        scores = one @ other.t() * towers.temperature.exp()
        pairs = torch.arange(left.shape[0])
        return F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)

    return make_script(towers, loss)


def pairs(rows):
    return {"left": torch.randn(rows, 4), "right": torch.randn(rows, 5)}


VARYING_ROWS = (7, 8, 6, 5, 9, 3, 11, 4, 2, 1, 12)
TEXT_ROWS = (7,) * 5 + (5, 8, 4, 6, 1)
SCENARIOS = [
    Scenario(build=recurrent, batch=sequences, rows=VARYING_ROWS),
    Scenario(build=normalised_convolutions, batch=sequences, rows=tuple(rows for rows in VARYING_ROWS if rows > 1)),
    Scenario(build=encoder_with_padding, batch=sequences, rows=VARYING_ROWS),
    Scenario(build=contrastive, batch=pairs, rows=tuple(rows for rows in VARYING_ROWS if rows > 1)),
    Scenario(build=language_model, batch=text, rows=TEXT_ROWS),
    Scenario(build=language_model_with_dropout, batch=text, rows=TEXT_ROWS),
]


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sample_cases(SCENARIOS, 2, 3))
def test_batches_of_varying_rows_and_length_train_exactly(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)


@contextlib.contextmanager
def record_captures() -> Iterator[list[bool]]:
    """Record for every capture inside the context whether it had varying sizes."""
    found = []
    original = program_cache.capture

    def record(*args, sizes, **kwargs):
        found.append(sizes is not None)
        return original(*args, sizes=sizes, **kwargs)

    program_cache.capture = record
    try:
        yield found
    finally:
        program_cache.capture = original


def count_captures(mesh, build, batches):
    """Return the captures for a script's batches, and the warnings."""
    torch.manual_seed(1)
    warnings = []
    world = World(mesh=mesh, notify=warnings.append, send_record=lambda _: None)
    script = build()
    (step,) = script.steps
    job = make_job(
        step.function, model=script.modules, optimizer=step.optimizer, view="consistent", world=lambda: world
    )
    with record_captures() as found:
        for batch in batches:
            call_with_batch(job, batch)
    return found, warnings


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_200_lengths_need_three_captures(workers):
    batches = [text(6, length) for length in range(202, 2, -1)]
    for found, warnings in on_mesh(workers, count_captures, language_model, batches):
        assert found == [False, False, True], warnings
        assert warnings == []
