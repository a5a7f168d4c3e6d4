"""Products, embeddings, normalizations, losses, attention and recurrent layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from operator_cases import Case, batch_last, batch_second, labels_of, numbers, split
from torch import Tensor, nn

aten = torch.ops.aten


def attention(causal: bool = False, masked: str = "") -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        query, key, value = x.view(x.shape[0], 2, 4, 3, 3).unbind(3)
        mask = None
        if masked == "positions":
            mask = numbers(4, 4)
        elif masked == "rows":
            mask = x.view(x.shape[0], -1)[:, :4].view(-1, 1, 1, 4)
        elif masked == "boolean":
            mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)

    return function


def run_recurrent(kind: str) -> Callable[[Tensor], Tensor]:
    layer = getattr(nn, kind)(3, 2, batch_first=True).double()
    for place, parameter in enumerate(layer.parameters()):
        parameter.requires_grad_(False).copy_(numbers(*parameter.shape) * (place + 1) / 4)
    weights = list(layer.parameters())

    def function(x: Tensor) -> Tensor:
        sequence = x.view(x.shape[0], 4, 3)
        state = x.new_zeros(1, x.shape[0], 2)
        if kind == "LSTM":
            out, hidden, cell = torch.lstm(sequence, (state, state), weights, True, 1, 0.0, True, False, True)
            return torch.cat([out, hidden.transpose(0, 1), cell.transpose(0, 1)], dim=1)
        out, hidden = torch.gru(sequence, state, weights, True, 1, 0.0, True, False, True)
        return torch.cat([out, hidden.transpose(0, 1)], dim=1)

    return function


MATRICES = {
    "mm": Case(lambda x: x @ numbers(6, 3) + (x.t() @ x).sum()),
    "bmm": Case(lambda x: x @ x.transpose(1, 2), (2, 3)),
    "bmm over the batch": Case(lambda x: torch.einsum("bij,bik->ijk", x, x), (2, 3)),
    "mv": Case(lambda x: aten.mv(x, numbers(6)).square() + aten.mv(x.t(), x[:, 0]).sum()),
    "dot": Case(lambda x: torch.dot(x[:, 0], x[:, 1]).square()),
    "dot of complex numbers": Case(
        lambda x: torch.vdot(torch.complex(x[:, 0], x[:, 1]), torch.complex(x[:, 2], x[:, 3])).abs().square()
    ),
    "convolution over split channels": Case(
        batch_second(lambda x: F.conv2d(x, numbers(4, 7, 3, 3), padding=1).square()), (2, 4, 4)
    ),
    "convolution with a split weight": Case(
        lambda x: (
            F.conv2d(numbers(2, 3, 5, 5), x, x[:, 0, 0, 0]).square() + F.conv_transpose2d(numbers(2, 7, 3, 3), x).sum()
        ),
        (3, 2, 2),
    ),
    "columns of a table": Case(batch_last(lambda x: F.embedding(torch.tensor([[0, 3], [1, 3]]), x).square()), (4,)),
    "addmm": Case(lambda x: torch.addmm(numbers(3), x, numbers(6, 3)).square()),
    "addmm over the batch": Case(lambda x: torch.addmm(numbers(6, 6), x.t(), x).square()),
    "addmm with a bias per row": Case(lambda x: torch.addmm(x[:, :1], x, numbers(6, 3)).square()),
    "addmm with factors": Case(lambda x: torch.addmm(x.t() @ x, x.t(), x, beta=0.5, alpha=2.0).square()),
    "baddbmm": Case(lambda x: torch.baddbmm(x[:, :, :2], x, x.transpose(1, 2), beta=0.5, alpha=3), (2, 3)),
    "linear of sequences": Case(lambda x: F.linear(x, numbers(4, 3), numbers(4)).square(), (2, 3)),
    "linear with a weight of the batch": Case(lambda x: F.linear(x, x[0]).square() + F.linear(x, x.sum(0)), (2, 3)),
    "linear over a split feature": Case(batch_last(lambda x: F.linear(x, x[0]).square()), (2, 3)),
    "convolution": Case(lambda x: F.conv2d(x, numbers(4, 2, 3, 3), numbers(4), padding=1).square(), (2, 4, 4)),
    "transposed convolution": Case(lambda x: F.conv_transpose1d(x, numbers(2, 3, 2), stride=2).square(), (2, 4)),
    "convolution in groups": Case(lambda x: F.conv1d(x, x.sum(0)[:, None, :3], groups=2), (2, 6)),
    "embedding": Case(lambda x: F.embedding(labels_of(x, 5), x.sum(0), padding_idx=1), (5, 3)),
    "embedding whose gradients are scaled by frequency": Case(
        lambda x: F.embedding(labels_of(x, 5), x.sum(0), scale_grad_by_freq=True), (5, 3)
    ),
    "lstm": Case(run_recurrent("LSTM"), (12,)),
    "gru": Case(run_recurrent("GRU"), (12,)),
}
SPLIT_MATRICES = {
    "addmv and addr": split(
        lambda x: torch.addmv(x[:, 0], x, numbers(6), beta=0.5).square() + torch.addr(x, x[:, 0], numbers(6)).sum()
    ),
    "addbmm": split(lambda x: torch.addbmm(x.sum(0), x, x, beta=0.5, alpha=2).square(), (3, 3)),
    "addbmm of a batch in the middle": split(
        batch_second(lambda x: torch.addbmm(x.sum((0, 2))[:, None], x, numbers(3, 4, 2)).square()), (3, 4)
    ),
    "bilinear": split(lambda x: F.bilinear(x, x.cos(), x.sum(0) * numbers(3, 6, 6), numbers(3)).square()),
    "distances of batches": split(lambda x: torch.cdist(x, x.flip(1) + 1).square(), (3, 4)),
    "distances that broadcast": Case(lambda x: torch.cdist(x[:, None], numbers(2, 5, 4)).square(), (3, 4)),
    "distances of rows": split(lambda x: torch.cdist(x, numbers(5, 6), p=1).square() + torch.cdist(x, numbers(5, 6))),
    "distances of many rows": Case(lambda x: torch.cdist(x, numbers(5, 6)).square(), rows=30),
    "embedding bag": split(
        lambda x: (
            F.embedding_bag(
                labels_of(x, 9)[:, None] // numbers(4).abs().ceil().long(), x.sum(0), mode="mean", padding_idx=1
            )
            + F.embedding_bag((x[:, 0] > 0).long(), x.sum(0), mode="sum", per_sample_weights=x[:, 1])
        ),
        (10, 3),
    ),
}
NORMALIZATIONS = {
    "layer norm": Case(lambda x: F.layer_norm(x, (3,), x.sum((0, 1)), numbers(3)).square(), (2, 3)),
    "layer norm over two dims": Case(lambda x: F.layer_norm(x, (2, 3)).square(), (2, 3)),
    "rms norm": Case(lambda x: F.rms_norm(x, (3,), x.sum((0, 1))).square(), (2, 3)),
    "group norm": Case(lambda x: F.group_norm(x, 2, x.sum((0, 2)), numbers(4)).square(), (4, 3)),
    "batch norm": Case(
        lambda x: F.batch_norm(x.exp(), numbers(4), numbers(4) + 2, x.sum((0, 2)), numbers(4), training=True).square(),
        (4, 3),
    ),
    "batch norm without statistics": Case(lambda x: F.batch_norm(x.exp(), None, None, training=True).square(), (4,)),
    "batch norm with constants": Case(
        lambda x: F.batch_norm(x, numbers(4), numbers(4) + 2, x.sum((0, 2)), training=False).square(), (4, 3)
    ),
    "batch norm on a constant weight": Case(
        lambda x: F.batch_norm(x.exp(), None, None, numbers(4), training=True).square(), (4, 2, 2)
    ),
}
SPLIT_NORMALIZATIONS = {
    "instance norm of sequences": split(
        lambda x: F.instance_norm(x, weight=x.sum((0, 2)), bias=numbers(3)).square(), (3, 4)
    ),
    "instance norm of images": split(lambda x: F.instance_norm(x).square(), (3, 4, 2)),
    "instance norm of volumes": split(lambda x: F.instance_norm(x, weight=x.sum((0, 2, 3, 4))).square(), (3, 2, 2, 2)),
    "instance norm with statistics": split(
        lambda x: F.instance_norm(
            x, numbers(3), numbers(3).abs() + 1, x.sum((0, 2)), numbers(3), use_input_stats=False
        ).square(),
        (3, 4),
    ),
    "instance norm with running statistics": split(
        lambda x: F.instance_norm(x, numbers(3), numbers(3).abs() + 1, x.sum((0, 2)), numbers(3)).square(), (3, 4)
    ),
    "instance norm without gradient of its input": split(
        lambda x: F.instance_norm(x.detach(), weight=x.sum((0, 2))).square(), (3, 4)
    ),
}
LOSSES = {
    "CTC": Case(
        lambda x: F.ctc_loss(
            x.transpose(0, 1).log_softmax(2), labels_of(x, 4)[:, None].expand(-1, 2) + 1, [6] * 7, [2, 1, 2, 2, 1, 2, 2]
        ),
        (6, 5),
    ),
    "mean loss": Case(lambda x: F.nll_loss(x, labels_of(x, 6))),
    "sum of losses": Case(lambda x: F.nll_loss(x, labels_of(x, 6), reduction="sum").square()),
    "loss per row": Case(lambda x: F.nll_loss(x, labels_of(x, 6), reduction="none").square()),
    "loss with ignored and weights": Case(
        lambda x: F.nll_loss(x, labels_of(x, 6), weight=numbers(6) + 2, ignore_index=3).square()
    ),
    "loss of pictures": Case(
        lambda x: F.cross_entropy(x, labels_of(x, 4)[:, None, None].expand(-1, 2, 3).contiguous()).square(), (4, 2, 3)
    ),
    "loss of pictures per pixel": Case(
        lambda x: F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="none", ignore_index=0).square(), (4, 2, 3)
    ),
    "loss of a batch on the classes' dim": Case(lambda x: F.nll_loss(x.t(), numbers(6).abs().long())),
}
ATTENTION = {
    "attention": Case(attention(), (2, 4, 9)),
    "causal attention": Case(attention(causal=True), (2, 4, 9)),
    "attention with a mask": Case(attention(masked="boolean"), (2, 4, 9)),
    "attention with a bias": Case(attention(masked="positions"), (2, 4, 9)),
    "attention with a bias per row": Case(lambda x: attention(masked="rows")(x), (2, 4, 9)),
}
