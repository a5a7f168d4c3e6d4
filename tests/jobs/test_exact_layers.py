"""Layers on real workers against the plain script: norms with their statistics, dropout, attention, recurrence."""

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, sample_cases
from torch import nn

CLASSES = 4


def make_script(model, loss, *, rate=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def make_classifier_script(model, **options):
    return make_script(model, lambda x, y: F.cross_entropy(model(x), y), **options)


def images(rows):
    return torch.randn(rows, 1, 12, 12), torch.randint(0, CLASSES, (rows,))


def vectors(rows):
    return torch.randn(rows, 6), torch.randint(0, CLASSES, (rows,))


def sequences(rows):
    return torch.randn(rows, 5, 8), torch.randint(0, CLASSES, (rows,))


def tokens(rows):
    words = torch.randint(1, 11, (rows, 6))
    lengths = torch.randint(2, 7, (rows, 1))
    return torch.where(torch.arange(6) < lengths, words, 0), torch.randint(0, CLASSES, (rows,))


def lenet():
    return make_classifier_script(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.2),
            nn.Conv2d(4, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(24, CLASSES),
        )
    )


def batch_norm_without_affine():
    return make_classifier_script(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False, momentum=0.3), nn.ReLU(), nn.Linear(8, CLASSES))
    )


def batch_norm_without_statistics():
    return make_classifier_script(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh(), nn.Linear(8, CLASSES))
    )


def batch_norm_that_is_frozen():
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    norm.eval()
    return make_classifier_script(model)


def batch_norm_of_sequences():
    return make_classifier_script(
        nn.Sequential(nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.GELU(), nn.Flatten(), nn.Linear(36, CLASSES))
    )


def other_norms():
    return make_classifier_script(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.SiLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.InstanceNorm2d(4, affine=True),
            nn.Flatten(),
            nn.LayerNorm(64),
            nn.RMSNorm(64),
            nn.Linear(64, CLASSES),
        )
    )


class DropoutAcross(nn.Module):
    """Dropout on layouts other than the batch's."""

    def __init__(self):
        super().__init__()
        self.alpha = nn.AlphaDropout(0.2)
        self.outer = nn.Linear(8, CLASSES)

    def forward(self, x):
        turned = F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1)
        permuted = F.dropout1d(turned.permute(0, 2, 1), 0.2).permute(0, 2, 1)
        noisy = self.alpha(permuted) + 0.1 * torch.randn_like(permuted) * torch.rand(8)
        return self.outer(F.dropout(noisy.mean(1), 0.1))


def dropout_on_transposed_layouts():
    return make_classifier_script(DropoutAcross())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.outer = nn.Linear(8, CLASSES)

    def forward(self, x):
        mixed, weights = self.inner(x, x, x, need_weights=True)
        return self.outer(mixed.mean(1)) + weights.square().mean()


def multihead_attention():
    return make_classifier_script(Attention())


def encoder_layer_with_dropout():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return make_classifier_script(nn.Sequential(layer, nn.Flatten(), nn.Linear(40, CLASSES)))


def encoder_layer_time_first():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, norm_first=True)
    outer = nn.Linear(8, CLASSES)
    model = nn.ModuleList([layer, outer])
    return make_script(model, lambda x, y: F.cross_entropy(outer(layer(x.transpose(0, 1)).mean(0)), y))


class Fused(nn.Module):
    """Fused attention: causal, masked, and with fewer heads of keys than of queries."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 32)
        self.outer = nn.Linear(8, CLASSES)

    def forward(self, x):
        query, key, value, _ = self.inner(x).view(*x.shape[:2], 4, 2, 4).permute(2, 0, 3, 1, 4)
        mask = torch.rand(x.shape[1], x.shape[1]) > 0.2
        mask = mask | torch.eye(x.shape[1], dtype=torch.bool)
        causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        masked = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        biased = F.scaled_dot_product_attention(query, key, value, attn_mask=x.mean(2)[:, None, None, :])
        grouped = F.scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True)
        return self.outer((causal + masked + biased + grouped).transpose(1, 2).flatten(2).mean(1))


def fused_attention():
    return make_classifier_script(Fused())


class Recurrent(nn.Module):
    def __init__(self, kind, *, batch_first=True, **options):
        super().__init__()
        self.batch_first = batch_first
        self.inner = kind(8, 6, batch_first=batch_first, **options)
        self.outer = nn.LazyLinear(CLASSES)

    def forward(self, x):
        out, states = self.inner(x if self.batch_first else x.transpose(0, 1))
        last = out[:, -1] if self.batch_first else out[-1]
        final = states[0] if isinstance(states, tuple) else states
        return self.outer(torch.cat([last, final[-1]], dim=1))


def recurrent(kind, **options):
    model = Recurrent(kind, **options)
    model(torch.zeros(2, 5, 8))
    return make_classifier_script(model)


def lstm():
    return recurrent(nn.LSTM)


def lstm_of_two_layers_with_dropout():
    return recurrent(nn.LSTM, num_layers=2, dropout=0.2, batch_first=False)


def lstm_both_ways():
    return recurrent(nn.LSTM, bidirectional=True, bias=False)


def gru_of_two_layers_both_ways():
    return recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.1)


class Words(nn.Module):
    """An embedding whose table is also the output's weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.inner = nn.Linear(6, 6)
        self.back = nn.Linear(6, 11, bias=False)
        self.back.weight = self.table.weight

    def forward(self, words):
        return self.back(torch.tanh(self.inner(self.table(words))))


def tied_embedding():
    model = Words()

    def loss(words, _):
        out = model(words)[:, :-1]
        return F.cross_entropy(out.reshape(-1, 11), words[:, 1:].reshape(-1), ignore_index=0)

    return make_script(model, loss)


class Scaled(torch.autograd.Function):
    """A function whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * (x > 0), None


class Averaging(nn.Module):
    """A module with a running average of its inputs in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("largest", torch.zeros(6), persistent=False)
        self.outer = nn.Linear(6, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.calls += 1
            self.largest.copy_(torch.maximum(self.largest, x.amax(0)))
        return self.outer(Scaled.apply(x - self.average, 2.0))


def buffers_and_a_function_of_the_users():
    return make_classifier_script(Averaging())


def frozen_parts():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return make_classifier_script(model)


def two_models(norm=nn.LayerNorm):
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), norm(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    first = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
    second = torch.optim.SGD(generator.parameters(), lr=0.05)

    def criticise(x, _):
        with torch.no_grad():
            made = generator(torch.randn_like(x))
        return F.softplus(-critic(x)).mean() + 0.5 * F.softplus(critic(made)).mean()

    def generate(x, _):
        return F.softplus(-critic(generator(torch.randn(len(x), 6)))).mean()

    steps = [Step(function=criticise, optimizer=first), Step(function=generate, optimizer=second)]
    return Script(modules={"generator": generator, "critic": critic}, steps=steps)


def two_models_with_batch_norm():
    return two_models(nn.BatchNorm1d)


def predictions():
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        return F.cross_entropy(model(x), y)

    def predict(x, y):
        out = model(x)
        best = out.argmax(dim=1)
        hits = (best == y).sum()
        top, _ = out.softmax(1).topk(2, dim=1)
        return {"out": out, "best": best, "hits": hits, "share": hits / len(x), "top": (top, out.norm(dim=1)), "n": 3}

    return Script(modules={"model": model}, steps=[Step(function=train, optimizer=optimizer), Step(function=predict)])


def train_and_eval_in_turn():
    script = predictions()
    model = script.modules["model"]
    return Script(modules=script.modules, steps=script.steps, after_batch=lambda: model.train(not model.training))


def unused_parts():
    model = nn.ModuleList([nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step = Step(function=lambda x, y: F.cross_entropy(model[0](x), y), optimizer=optimizer)
    return Script(modules={"model": model}, steps=[step])


MANY = (7,) * 10 + (5,) * 9 + (3,)
# Few kinds of batches, where capturing a program takes long.
FEW = (9,) * 19 + (5,)
SCENARIOS = [
    Scenario(build=lenet, batch=images, rows=(*MANY[:-1], 2), vanishing=["0.bias"]),
    Scenario(build=batch_norm_without_affine, batch=vectors, rows=MANY, vanishing=["0.bias"]),
    Scenario(build=batch_norm_without_statistics, batch=vectors, rows=MANY, vanishing=["0.bias"]),
    Scenario(build=batch_norm_that_is_frozen, batch=vectors),
    Scenario(build=batch_norm_of_sequences, batch=sequences, vanishing=["0.bias"]),
    Scenario(build=other_norms, batch=images, vanishing=["3.bias"]),
    Scenario(build=dropout_on_transposed_layouts, batch=sequences, rows=FEW),
    Scenario(build=multihead_attention, batch=sequences, rows=FEW),
    Scenario(build=encoder_layer_with_dropout, batch=sequences, rows=FEW),
    Scenario(build=encoder_layer_time_first, batch=sequences, rows=FEW),
    Scenario(build=fused_attention, batch=sequences),
    Scenario(build=lstm, batch=sequences),
    Scenario(build=lstm_of_two_layers_with_dropout, batch=sequences, rows=FEW),
    Scenario(build=lstm_both_ways, batch=sequences),
    Scenario(build=gru_of_two_layers_both_ways, batch=sequences, rows=FEW),
    Scenario(build=tied_embedding, batch=tokens),
    Scenario(build=buffers_and_a_function_of_the_users, batch=vectors),
    Scenario(build=frozen_parts, batch=vectors),
    Scenario(build=unused_parts, batch=vectors),
    Scenario(build=train_and_eval_in_turn, batch=vectors, rows=MANY),
    Scenario(build=two_models, batch=vectors, rows=MANY),
    Scenario(
        build=two_models_with_batch_norm,
        batch=vectors,
        rows=MANY,
        # Batch norm takes the generator's means out again: its gradients are what remains of sums that cancel.
        dtypes=[torch.float64],
        vanishing=["critic.0.bias", "generator.2.bias"],
    ),
    Scenario(build=predictions, batch=vectors, rows=MANY),
]


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sample_cases(SCENARIOS))
def test_losses_gradients_statistics_and_parameters_equal_the_plain_scripts(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)
