"""Adversarial cases with modules: buffers, modes, models not passed, recurrent layers, attention, normalization."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron, rows
from torch import nn
from torch.nn.utils import parametrizations


class Averaging(nn.Module):
    """Keeps a running mean in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.register_buffer("mean", torch.zeros(4).double())

    def forward(self, features):
        scores = self.linear(features)
        self.mean.mul_(0.9).add_(scores.detach().mean(0))
        return scores + self.mean


class ReplacingItsBuffer(Averaging):
    def forward(self, features):
        scores = self.linear(features)
        self.mean = self.mean * 0.9 + scores.detach().mean(0)
        return scores + self.mean


class LeavingOneOut(nn.Sequential):
    def forward(self, features):
        return self[2](self[1](self[0](features)))


def classifier(model, *, make=rows, **options):
    """Return a script whose model classifies rows."""

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches(make), **options)


def buffer_changed_in_place():
    return classifier(Averaging())


def buffer_replaced():
    model = ReplacingItsBuffer()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def scores_kept_in_an_attribute():
    class RememberingScores(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4).double()
            self.last = None

        def forward(self, features):
            scores = self.linear(features)
            if self.last is not None:
                scores = scores + self.last
            self.last = scores.detach()  # the line
            return scores

    model = RememberingScores()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def model_not_given():
    model, first = perceptron(), nn.Linear(6, 6).double()

    def loss(features, labels):
        features = first(features)  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def frozen_model_not_given():
    model, first = perceptron(), nn.Linear(6, 6).double().requires_grad_(False)

    def loss(features, labels):
        return F.cross_entropy(model(first(features)), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def mode_of_one_module_that_changes():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    return classifier(model, before_call=lambda number: model[1].train(number != 1))


def unused_parameters():
    return classifier(LeavingOneOut(*perceptron(), nn.Linear(2, 2).double()))


def recurrent(model, features, *, hidden, length=7, dtype=torch.float64):
    """Return a script that classifies the last state of a recurrent layer."""
    output = nn.Linear(hidden, 4, dtype=dtype)

    def loss(sequence, labels):
        states, _ = model(sequence)
        return F.cross_entropy(output(states[:, -1]), labels)

    def sequences():
        return torch.randn(3, length, features, dtype=dtype), torch.randint(0, 4, (3,))

    return Script(function=loss, modules={"model": model, "output": output}, batches=batches(sequences, 2))


def long_lstm():
    return recurrent(nn.LSTM(6, 8, num_layers=2, batch_first=True).double(), 6, hidden=8, length=64)


def lstm_of_float32():
    return recurrent(nn.LSTM(6, 8, batch_first=True), 6, hidden=8, dtype=torch.float32)


def bidirectional_lstm_with_dropout():
    model = nn.LSTM(6, 8, num_layers=3, dropout=0.4, bidirectional=True, batch_first=True).double()
    return recurrent(model, 6, hidden=16)


def gru():
    return recurrent(nn.GRU(6, 8, num_layers=2, batch_first=True).double(), 6, hidden=8)


def packed_sequence():
    model, output = nn.LSTM(6, 8, batch_first=True).double(), nn.Linear(8, 4).double()

    def loss(sequence, lengths, labels):
        packed = nn.utils.rnn.pack_padded_sequence(sequence, lengths, batch_first=True)  # the line
        _, (state, _) = model(packed)
        return F.cross_entropy(output(state[-1]), labels)

    def sequences():
        return torch.randn(3, 7, 6).double(), torch.tensor([7, 5, 3]), torch.randint(0, 4, (3,))

    return Script(function=loss, modules={"model": model, "output": output}, batches=batches(sequences))


def embedded(embedding, *shape):
    output = nn.Linear(6, 4).double()

    def loss(words, labels):
        return F.cross_entropy(output(embedding(words)), labels)

    def words():
        return torch.randint(0, 9, (5, *shape)), torch.randint(0, 4, (5,))

    return Script(function=loss, modules={"embedding": embedding, "output": output}, batches=batches(words))


def embedding_bag():
    return embedded(nn.EmbeddingBag(9, 6, mode="mean").double(), 3)


def sparse_embedding():
    return embedded(nn.Embedding(9, 6, sparse=True).double())


def embedding_that_shortens_its_rows():
    embedding, output = nn.Embedding(9, 6, max_norm=0.5).double(), nn.Linear(6, 4).double()

    def loss(words, labels):
        return F.cross_entropy(output(embedding(words)), labels)

    def words():
        return torch.randint(0, 9, (5,)), torch.randint(0, 4, (5,))

    return Script(function=loss, modules={"embedding": embedding, "output": output}, batches=batches(words))


def batch_norm_and_dropout():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)).double())


def spectral_and_weight_norm():
    first = parametrizations.spectral_norm(nn.Linear(6, 8))
    second = parametrizations.weight_norm(nn.Linear(8, 4))
    return classifier(nn.Sequential(first, second).double())


def attention(**options):
    model = nn.Linear(6, 18).double()

    def loss(sequence):
        query, key, value = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in model(sequence).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value, **options).pow(2).mean()

    def sequences():
        return (torch.randn(3, 5, 6).double(),)

    return Script(function=loss, modules={"model": model}, batches=batches(sequences))


def causal_attention():
    return attention(is_causal=True)


def attention_with_dropout():
    return attention(dropout_p=0.3)


class FirstOfSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.output = nn.Linear(6, 4)

    def forward(self, sequence):
        return self.output(self.encoder(sequence)[:, 0])


def encoder_layer():
    def sequences():
        return torch.randn(3, 5, 6).double(), torch.randint(0, 4, (3,))

    return classifier(FirstOfSequence().double(), make=sequences)


CASES = [
    AdversarialCase(build=buffer_changed_in_place),
    AdversarialCase(build=buffer_replaced, refused=r"model\.mean is replaced by another tensor"),
    AdversarialCase(build=scores_kept_in_an_attribute, refused=r"model\.last, in which the job keeps a tensor"),
    AdversarialCase(build=model_not_given, refused=r"a parameter of shape \[6, 6\] of a module that was not passed"),
    AdversarialCase(build=frozen_model_not_given),
    AdversarialCase(build=mode_of_one_module_that_changes),
    AdversarialCase(build=unused_parameters),
    AdversarialCase(build=long_lstm),
    AdversarialCase(build=lstm_of_float32, tolerance=1e-5),
    AdversarialCase(build=bidirectional_lstm_with_dropout),
    AdversarialCase(build=gru),
    AdversarialCase(build=packed_sequence, refused=r"pack_padded_sequence needs the value of a tensor"),
    AdversarialCase(build=embedding_bag),
    AdversarialCase(build=sparse_embedding),
    AdversarialCase(build=embedding_that_shortens_its_rows),
    AdversarialCase(build=batch_norm_and_dropout),
    AdversarialCase(build=spectral_and_weight_norm),
    AdversarialCase(build=causal_attention),
    AdversarialCase(build=attention_with_dropout),
    AdversarialCase(build=encoder_layer),
]
