"""The models of the benchmarks, with optional dropout and norm, and batches for them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 64
CHARACTERS = 128


class MLP(nn.Sequential):
    """Eight layers of width 512, and ten classes."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        hidden = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout))]
        super().__init__(*hidden, nn.Linear(512, 10))


class LargeMLP(nn.Sequential):
    """Six layers of width 2048: 25 million parameters, which take 100 MB."""

    def __init__(self) -> None:
        hidden = [part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(2048, 10))


class LeNet(nn.Sequential):
    """Convolutions of 32 and 64 filters and a hidden layer of width 512, on 28 x 28 pixels."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        norms = [nn.BatchNorm2d(32), nn.BatchNorm2d(64)] if norm else [nn.Identity(), nn.Identity()]
        super().__init__(
            *(nn.Conv2d(1, 32, 5, padding=2), norms[0], nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), norms[1], nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(), nn.Dropout(dropout), nn.Linear(512, 10)),
        )


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        query, key, value = mixed.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.dropout(self.projection(attended))
        return hidden + self.dropout(self.feed(self.feed_norm(hidden)))


class SplitBlock(Block):
    """The same with a matrix each for queries, keys and values, which a script divides by columns."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__(width=width, heads=heads, dropout=dropout)
        del self.query_key_value
        self.features = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        normed = self.attention_norm(hidden)
        parts = [layer(normed) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.view(rows, length, -1, self.features).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, length, -1)
        hidden = hidden + self.dropout(self.projection(attended))
        return hidden + self.dropout(self.feed(self.feed_norm(hidden)))


class GPT(nn.Module):
    """A small GPT on characters."""

    block: type[Block] = Block

    def __init__(self, *, layers: int = 4, width: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[self.block(width=width, heads=4, dropout=dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CHARACTERS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        hidden = self.characters(text) + self.positions(positions)
        return self.output(self.norm(self.blocks(hidden)))


class SplitGPT(GPT):
    """The same with a matrix each for queries, keys and values."""

    block = SplitBlock


class Attention(nn.Module):
    """Four layers of PyTorch's own multi-head attention, and ten classes for each position."""

    def __init__(self, *, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(4))
        self.output = nn.Linear(width, CHARACTERS)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden, hidden, hidden, need_weights=False)[0]
        return self.output(hidden)


class Transformer(nn.Module):
    """PyTorch's own encoder and decoder, two layers each, from a sequence to itself."""

    def __init__(self, *, width: int = 128) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.characters(text)
        return self.output(self.transformer(hidden, hidden))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, channels: int, *, grows: bool) -> None:
        super().__init__()
        before, step = (channels // 2, 2) if grows else (channels, 1)
        self.first = nn.Conv2d(before, channels, 3, stride=step, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3 if grows else 2))
        self.way_around = nn.Conv2d(before, channels, 1, stride=step, bias=False) if grows else None

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norms[1](self.second(torch.relu(self.norms[0](self.first(images)))))
        around = images if self.way_around is None else self.norms[2](self.way_around(images))
        return torch.relu(hidden + around)


class ResNet(nn.Sequential):
    """A small ResNet for images of 32 x 32 pixels: eight convolutions in three stages of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(ResidualBlock(16, grows=False), ResidualBlock(32, grows=True), ResidualBlock(64, grows=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        )


class BERT(nn.Module):
    """A small BERT: PyTorch's own encoder with dropout on characters, and a character for each position."""

    def __init__(self, *, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        return self.output(self.encoder(self.characters(text) + self.positions(positions)))


class ManyParameters(nn.Module):
    """Hundreds of tiny layers: what a call costs beside its computation grows with the number of parameters."""

    def __init__(self, *, layers: int = 400) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden) * 0.01
        return hidden


def random_text(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch of random characters, and the characters that follow."""
    text = torch.randint(CHARACTERS, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def random_classes(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a batch of noise, and random classes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)


def random_batch(name: str) -> tuple[Tensor, Tensor]:
    """Return a batch for a model, given its name, like "gpt_dropout"."""
    if name == "resnet":
        return random_classes((64, 3, 32, 32))
    if name.startswith(("gpt", "transformer", "bert")):
        return random_text(rows=32)
    if name == "attention":
        return torch.randn(32, CONTEXT, 128), random_text(rows=32)[1]
    if name == "mlp_100_mb":
        return random_classes((16, 2048))
    return random_classes((256, 512) if name.startswith("mlp") else (100, 1, 28, 28))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of a batch's classes, or of all its characters."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
