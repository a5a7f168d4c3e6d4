"""Models of many kinds, as people write them, for an axis of the mesh that divides parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, ROWS, WIDTH = 40, 6, 4, 16
Case = tuple[Callable[..., Any], dict[str, nn.Module], list[Tensor]]


def make_ids(words: int = WORDS) -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    ids = torch.randint(0, words, (2, ROWS, LENGTH), generator=generator)
    return [ids[0], ids[1]]


def make_images(channels: int = 1, size: int = 28, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(4)
    images = torch.randn(rows, channels, size, size, dtype=torch.float64, generator=generator)
    return [images, torch.randint(0, 10, (rows,), generator=generator)]


class Attention(nn.Module):
    """Self-attention whose queries, keys and values come from one matrix, taken apart in one of several ways."""

    def __init__(self, form: str, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.form, self.heads, self.dropout = form, heads, dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        joined = self.qkv(hidden)
        if self.form == "split":
            parts = joined.split(width, dim=2)
        elif self.form == "chunk":
            parts = joined.chunk(3, dim=-1)
        elif self.form == "slice":
            parts = (joined[..., :width], joined[..., width : 2 * width], joined[..., 2 * width :])
        elif self.form == "three":
            parts = joined.view(rows, length, 3, width).unbind(2)
        elif self.form == "permuted":
            taken = joined.reshape(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            return self.attend(taken[0], taken[1], taken[2])
        else:  # heads first, as in Megatron
            parts = joined.view(rows, length, self.heads, 3, -1).unbind(3)
            return self.attend(*(part.transpose(1, 2) for part in parts))
        return self.attend(*(part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.form in ("slice", "three"):
            scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
            weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
            mixed = weights @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        rows, _, length, _ = mixed.shape
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self, form: str, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(form, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.mlp(self.second(hidden))


class Decoder(nn.Module):
    def __init__(
        self, form: str, heads: int = 4, dropout: float = 0.0, words: int = WORDS, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(form, heads, dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.dropout(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def make_decoder(form: str, **settings: Any) -> Case:
    torch.manual_seed(0)
    model = Decoder(form, **settings).double()

    def train(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    return train, {"model": model}, make_ids(settings.get("words", WORDS))


class Rows(nn.Module):
    """A row of layers for images, with a skip connection around the middle."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1, bias=not norm),
            nn.BatchNorm2d(12) if norm else nn.GroupNorm(2, 12),
            nn.ReLU(),
            nn.Conv2d(12, 8, 1),
        )
        self.pool, self.last = nn.AdaptiveAvgPool2d(2), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.first(images))
        hidden = F.max_pool2d(hidden + self.middle(hidden), 2)
        logits: Tensor = self.last(self.pool(hidden).flatten(1))
        return logits


def make_classifier(model: nn.Module, images: list[Tensor]) -> Case:
    model = model.double()

    def train(given: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(given), labels)

    return train, {"model": model}, images


def make_lenet() -> Case:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 40),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(40, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )
    return make_classifier(layers, make_images())


def make_residual(*, norm: bool) -> Case:
    torch.manual_seed(0)
    return make_classifier(Rows(norm=norm), make_images())


class Gated(nn.Module):
    """An MLP whose gate and values come from one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = self.up(hidden).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * value)
        return result


def make_gated() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), nn.RMSNorm(WIDTH), Gated()).double()

    def train(values: Tensor) -> Tensor:
        return model(values).square().mean()

    return train, {"model": model}, [torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)]


def make_encoder_layers(**settings: Any) -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.1, batch_first=True, **settings)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()

    def train(values: Tensor) -> Tensor:
        return model(values).square().mean()

    return train, {"model": model}, [torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)]


COMMON = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
}
SHORT = {"vocab_size": WORDS, "n_layer": 2, "n_head": 4}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**SHORT, "n_embd": WIDTH, "n_positions": LENGTH}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**SHORT, "hidden_size": WIDTH, "use_cache": False}),
    "bert": ("BertForMaskedLM", "BertConfig", COMMON),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**COMMON, "use_cache": False}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**COMMON, "use_cache": False}),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**COMMON, "use_cache": False, "num_key_value_heads": 2, "pad_token_id": 0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "d_kv": 4,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
    ),
}
"""Classes of transformers, by name: a model, its configuration, and settings of this."""


def make_transformers(name: str, **settings: Any) -> Case:
    """Return a model of transformers, by configuration, that returns its loss."""
    import transformers  # noqa: PLC0415 - the other models do not need it

    torch.manual_seed(0)
    model_class, config_class, known = TRANSFORMERS[name]
    config = getattr(transformers, config_class)(**known, **settings)
    model = getattr(transformers, model_class)(config).double().train()

    def train(ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels).loss

    return train, {"model": model}, make_ids()


def make_vit() -> Case:
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config).double().train()

    def train(images: Tensor, labels: Tensor) -> Tensor:
        return model(pixel_values=images, labels=labels).loss

    return train, {"model": model}, make_images(size=8)


CASES: dict[str, Callable[[], Case]] = {
    **{
        f"decoder {form}": lambda form=form: make_decoder(form)
        for form in ("split", "chunk", "slice", "three", "permuted", "heads")
    },
    "decoder with dropout": lambda: make_decoder("slice", dropout=0.1),
    "decoder with odd words, not tied": lambda: make_decoder("split", words=37, tied=False),
    "decoder with two heads": lambda: make_decoder("split", heads=2),
    "lenet": make_lenet,
    "batch norm": lambda: make_residual(norm=True),
    "group norm": lambda: make_residual(norm=False),
    "gated": make_gated,
    "encoder": lambda: make_encoder_layers(),
    "encoder, norm first": lambda: make_encoder_layers(norm_first=True, activation="gelu"),
    "gpt2": lambda: make_transformers("gpt2"),
    "bert": lambda: make_transformers("bert"),
    "llama": lambda: make_transformers("llama", num_key_value_heads=2),
    "llama, one key": lambda: make_transformers("llama", num_key_value_heads=1),
    "llama, eager": lambda: make_transformers("llama", num_key_value_heads=2, attn_implementation="eager"),
    "t5": lambda: make_transformers("t5"),
    "vit": make_vit,
    "neox": lambda: make_transformers("neox"),
    "phi3": lambda: make_transformers("phi3"),
    "bloom": lambda: make_transformers("bloom"),
}
