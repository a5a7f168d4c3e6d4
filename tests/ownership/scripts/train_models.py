"""Train one of several models, with divided states or in a pipeline, with the settings that a user may combine."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import rankless

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--zero", choices=["optimizer", "gradients", "parameters"])
parser.add_argument("--schedule", choices=["gpipe", "1f1b", "interleaved", "zero-bubble"])
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--recompute", type=float)
parser.add_argument("--random", default="generator")
parser.add_argument("--optimizer", choices=["sgd", "adamw", "adafactor", "muon"], default="adamw")
parser.add_argument("--clip", type=float)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--bfloat16", action="store_true")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--device", default="cpu", help="The kind of device, as for torch.autocast.")
options = parser.parse_args()

WORDS, LENGTH, ROWS = 31, 6, 26


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 40),
            nn.ReLU(),
            nn.Dropout(options.dropout),
            nn.Linear(40, 10),
        )

    def forward(self, images, labels):
        return F.cross_entropy(self.layers(images), labels)


class GPT(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, options.dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels):
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device, hidden.dtype)
        return F.cross_entropy(self.head(self.layers(hidden, mask, is_causal=True)).flatten(0, 1), labels.flatten())


class Towers(nn.Module):
    """Users and items, each with an embedding and a small network."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(WORDS, 8), nn.EmbeddingBag(WORDS, 8)
        self.user_net, self.item_net = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids, labels):
        left, right = torch.tanh(self.user_net(self.users(ids[:, 0]))), torch.tanh(self.item_net(self.items(ids)))
        dropped = F.dropout(left, options.dropout)
        return F.binary_cross_entropy_with_logits((dropped * right).sum(1), (labels[:, 0] % 2).to(left.dtype))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.LSTM(8, 6, num_layers=2, dropout=options.dropout, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, WORDS)

    def forward(self, ids, labels):
        with torch.backends.cudnn.flags(enabled=False):  # it draws dropout from a state of its own
            hidden = self.layer(self.words(ids))[0]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class MixtureLayer(nn.Module):
    """Attention, and experts of which each token uses two; each expert takes so many tokens of a sequence."""

    def __init__(self, experts=4, capacity=2):
        super().__init__()
        self.capacity = capacity
        self.attention = nn.MultiheadAttention(16, 2, options.dropout, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.router = nn.Linear(16, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, 16) / 6)

    def forward(self, hidden):
        normed = self.norms[0](hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        tokens = self.norms[1](hidden)
        chances = self.router(tokens).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        masks = F.one_hot(chosen, chances.shape[-1])
        order = masks.flatten(1, 2).cumsum(1).view_as(masks) * masks - 1
        slots = F.one_hot(order.clamp(min=0), 2 * LENGTH)[..., : self.capacity] * (order >= 0).unsqueeze(-1)
        places = (slots * weights[..., None, None]).sum(2)  # samples, tokens, experts, slots
        inputs = torch.einsum("btec,btd->ebcd", (slots.sum(2) > 0).to(tokens.dtype), tokens)
        features = F.gelu(torch.einsum("ebcd,edh->ebch", inputs, self.up))
        results = torch.einsum("ebch,ehd->ebcd", F.dropout(features, options.dropout), self.down)
        balance = (masks.to(tokens.dtype).mean((1, 2)) * chances.mean(1)).sum(-1).mean()  # within each sequence
        return hidden + torch.einsum("btec,ebcd->btd", places, results), balance


class LoopLayer(nn.Module):
    """Experts that are modules, one after another, of which each token uses two."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(options.dropout), nn.Linear(32, 16))
                for _ in range(3)
            ]
        )

    def forward(self, hidden):
        tokens = self.norm(hidden)
        chances = self.router(tokens).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        for number, expert in enumerate(self.experts):
            hidden = hidden + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(tokens)
        return hidden, chances.square().mean()


class Mixture(nn.Module):
    """A model with experts, whose capacities leave tokens out, and a loss for their balance."""

    def __init__(self, layer=MixtureLayer):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids, labels):
        hidden, balance = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)), 0.0
        for layer in self.layers:
            hidden, term = layer(hidden)
            balance = balance + term
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + 0.01 * balance


class Wrapped(nn.Module):
    """A model of transformers, by configuration, that returns its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        return self.model(input_ids=ids, labels=labels).loss


def make_bert():
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415 - the other models do not need it

    return Wrapped(
        BertForMaskedLM(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=options.dropout,
                attention_probs_dropout_prob=options.dropout,
            )
        )
    )


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    return Wrapped(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=32,
                max_position_embeddings=LENGTH,
                attention_dropout=options.dropout,
                use_cache=False,
            )
        )
    )


def make_t5():
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415

    return Wrapped(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=WORDS,
                d_model=16,
                d_kv=4,
                d_ff=32,
                num_layers=2,
                num_heads=4,
                dropout_rate=options.dropout,
                decoder_start_token_id=0,
                pad_token_id=0,
                use_cache=False,
            )
        )
    )


class Classifier(nn.Module):
    """A vision model of transformers, by configuration, that returns its loss."""

    def __init__(self):
        from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

        super().__init__()
        self.model = ViTForImageClassification(
            ViTConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=32,
                hidden_dropout_prob=options.dropout,
                attention_probs_dropout_prob=options.dropout,
                image_size=28,
                patch_size=7,
                num_channels=1,
                num_labels=10,
            )
        )

    def forward(self, images, labels):
        return self.model(pixel_values=images, labels=labels).loss


torch.manual_seed(1)
makers = {
    "lenet": LeNet,
    "gpt": GPT,
    "bert": make_bert,
    "llama": make_llama,
    "towers": Towers,
    "tagger": Tagger,
    "t5": make_t5,
    "vit": Classifier,
    "mixture": Mixture,
    "loop": lambda: Mixture(LoopLayer),
}
model = makers[options.model]().to(options.device)
if options.optimizer == "adafactor":
    # The default is the epsilon of the dtype. That of float64 is less than the rounding in a gradient that is zero, as
    # that of a bias of attention keys, and the update would be this rounding, divided by its own size.
    epsilon = torch.finfo(torch.float32).eps
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, eps=(epsilon, 1e-3))
elif options.optimizer == "muon":
    matrices = [item for item in model.parameters() if item.dim() == 2]
    others = [item for item in model.parameters() if item.dim() != 2]
    optimizer = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
elif options.optimizer == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


settings = {"schedule": options.schedule, "microbatches": 3} if options.schedule else {}
settings |= {"sequence_parallel": True} if options.sequence_parallel else {}


@rankless.job(
    model=model,
    optimizer=optimizer,
    zero=options.zero,
    clip_norm=options.clip,
    accumulate=options.accumulate,
    recompute=options.recompute,
    random=options.random,
    plan=rankless.Plan(**settings) if settings else None,
)
def train(inputs, labels):
    with torch.autocast(options.device, torch.bfloat16, enabled=options.bfloat16):
        return model(inputs, labels)


if options.model in ("lenet", "vit"):
    data = torch.utils.data.TensorDataset(torch.randn(ROWS, 1, 28, 28), torch.randint(0, 10, (ROWS,)))
else:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH + 1))
    data = torch.utils.data.TensorDataset(ids[:, :-1].clone(), ids[:, 1:].clone())
for inputs, labels in rankless.loader(data, batch_size=7, shuffle=True):  # the last batch has five rows
    loss = train(inputs, labels)
print(f"loss {float(loss):.6f}")
