"""Operators that rearrange, and elementwise operators."""

import torch
import torch.nn.functional as F
from operator_cases import Case, batch_last, batch_second, labels_of, numbers, split

aten = torch.ops.aten

VIEWS = {
    "view that divides": Case(lambda x: x.reshape(x.shape[0] * 2, 3)),
    "view that merges": Case(lambda x: x.reshape(-1), (2, 3)),
    "view that mixes": Case(lambda x: x.reshape(6, -1) ** 2),
    "view of the batch in the middle": Case(batch_second(lambda x: x.reshape(2, -1) ** 2), (2, 3)),
    "unsafe view": Case(lambda x: x @ numbers(3, 4), (2, 3)),
    "t": Case(lambda x: x.t().square()),
    "permute": Case(lambda x: x.permute(2, 0, 1).square(), (2, 3)),
    "unsqueeze": Case(lambda x: x.unsqueeze(0).square() + x.unsqueeze(-1).sum()),
    "squeeze": Case(lambda x: x.squeeze().square(), (1, 3, 1)),
    "squeeze that keeps rows of one": Case(
        lambda x: torch.cat([x.squeeze(), x.squeeze((0, 1)), x.squeeze(0)[:, 0]], 1).square(), (1, 3)
    ),
    "squeeze of a dim": Case(lambda x: x.squeeze(1).square(), (1, 3)),
    "squeeze of dims": Case(lambda x: x.squeeze((1, 3)).square(), (1, 3, 1)),
    "select": Case(lambda x: x[:, 2].square().sum() + x[4].square()),
    "slice": Case(lambda x: x[:, 1:5:2].square().sum() + x[2:-1].square()),
    "slice of all": Case(lambda x: x[:, :].square() + x[0:].square()),
    "expand": Case(lambda x: x[:, None].expand(-1, 3, -1).square()),
    "expand of the batch": Case(batch_last(lambda x: x.expand(2, *x.shape).square())),
    "repeat": Case(lambda x: x.repeat(1, 2).square().sum() + x.repeat(2, 1).square()),
    "pad": Case(lambda x: F.pad(x, (1, 2)).square().sum() + F.pad(x, (0, 0, 1, -1)).square()),
    "cat": Case(lambda x: torch.cat([x, x.square()], 1).square()),
    "cat with an empty cache": Case(lambda x: torch.cat([x.new_empty(0), x, x.square()], 1).square()),
    "cat of batches": Case(lambda x: torch.cat([x, x.square()]).square()),
    "split": Case(lambda x: sum(part.square().sum() * 2**i for i, part in enumerate((*x.split(4, 1), *x.chunk(3))))),
    "split by sizes": Case(
        lambda x: torch.cat([p.cos() for p in (*x.split([1, 2, 3], 1), *x.split([1, 4, 2]))][:3], 1)
    ),
    "unsafe splits": Case(
        lambda x: sum(
            part.square().sum() * 2**i
            for i, part in enumerate((*torch.unsafe_split(x, 4, 1), *torch.unsafe_split_with_sizes(x, [2, 4], 1)))
        )
    ),
    "copies of views": Case(
        lambda x: (
            torch.t_copy(x).square().sum()
            + torch.unfold_copy(x, 1, 2, 1).sum()
            + torch.narrow_copy(x, 1, 1, 3).exp().sum()
        )
    ),
    "zeros in place": Case(lambda x: x * 2 + x.detach().clone().zero_()),
    "stack and unbind": Case(lambda x: torch.stack(x.unbind(1), 1).square()),
}
SPLIT_VIEWS = {
    "diagonal": split(lambda x: x.diagonal(1, 1, -1).square(), (4, 4)),
    "diagonal of a batch in the middle": split(batch_second(lambda x: x.diagonal(0, 0, 2).square()), (4, 4)),
    "diagonals as matrices": split(lambda x: torch.diag_embed(x, 1).square(), (4,)),
    "a diagonal that is written": split(lambda x: torch.diagonal_scatter(x, x[:, 0], 0, 1, 2).square(), (4, 4)),
    "rearranged partial sums": split(
        lambda x: (
            torch.select_scatter(x.sum(0), x.mean(0)[1], 0, 2).roll(1, 0).flip(0) + x.sum(0).diagonal()
        ).square(),
        (3, 3),
    ),
    "windows of columns": split(lambda x: x.unfold(1, 3, 2).square()),
    "windows of a batch in the last dim": split(batch_last(lambda x: x.unfold(-2, 3, 1).square())),
    "channel shuffle": split(lambda x: F.channel_shuffle(x, 2).square(), (4, 3, 3)),
    "native channel shuffle": split(lambda x: x * aten.native_channel_shuffle(x.detach(), 2), (4, 3, 3)),
    "roll and rot90": split(lambda x: x.roll((1, 2), (1, -1)).square() + x.rot90(1, (1, 2)), (3, 3)),
    "complex views": split(lambda x: (torch.view_as_complex(x) * torch.view_as_complex(x.cos())).abs(), (3, 2)),
    "complex views of a batch in the middle": split(batch_second(lambda x: torch.view_as_complex(x).abs()), (3, 2)),
    "parts of complex numbers": split(
        lambda x: (lambda z: z.real.square() + z.imag * 3 + z.angle() + z.conj().imag + (z.mH @ z).imag)(
            torch.complex(x, x.cos())
        ),
        (3, 3),
    ),
    "polar": split(lambda x: torch.polar(x.abs(), x).real, (3,)),
}
POINTWISE = {
    "log sigmoid": Case(lambda x: F.logsigmoid(x).square()),
    "activations": Case(
        lambda x: F.gelu(x) + F.silu(x) + F.elu(x) + F.leaky_relu(x) + F.softplus(x) + F.hardtanh(x) + F.mish(x)
    ),
    "broadcasting": Case(lambda x: x * x.sum(0) + x[:, :1] - x.sum() + x / x.abs().sum(1, keepdim=True)),
    "partial sums together": Case(lambda x: (x.sum(0) * 3 - x.square().sum(0) / 2 - (-x.sum(0))).square()),
    "a partial sum and a constant": Case(lambda x: (x.sum(0) + numbers(6)).square() + (x.sum(0) - 1).square()),
    "product of partial sums": Case(lambda x: x.sum(0) * x.square().sum(0)),
    "clamp and where of a partial sum": Case(lambda x: x.sum(0).clamp(-1, 1) + torch.where(x.sum(0) > 0, x.mean(0), 2)),
    "casts of partial sums": Case(lambda x: (x.sum(0).float().double() - x.sum(0).int()) * x),
    "masks": Case(lambda x: x.masked_fill(x > 1, -1.0).square() + torch.where(x > 0, x, x.square())),
    "new tensors": Case(lambda x: x + x.new_zeros(6) + x.sum(0).new_ones(6) + x.new_full((6,), 2)),
    "new tensors that are filled": Case(lambda x: x * x.new_empty(6).fill_(3)),
    "prelu": Case(lambda x: F.prelu(x, x.sum((0, 2)).abs()[:3]).square(), (3, 2)),
}
SPLIT_POINTWISE = {
    "hard activations": split(
        lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.hardshrink(x) + F.softshrink(x) + F.relu6(x) + F.tanhshrink(x)
    ),
    "gated linear unit": split(lambda x: F.glu(x, 1).square()),
    "gated linear unit of a batch in the last dim": split(batch_last(lambda x: F.glu(x, -2).square())),
    "whole quotients": split(
        lambda x: x * torch.floor_divide(x.detach(), 0.3) + x * ((x > 0).long() // 2) + aten.rsub.Tensor(x, x.cos())
    ),
    "copy": split(lambda x: torch.empty_like(x).copy_(x * 2).square()),
    "fill": split(lambda x: torch.lerp(x, x.cos(), 0.3) + x * x.detach().clone().fill_(torch.tensor(2.0))),
    "membership": split(
        lambda x: (
            x
            * torch.isin(labels_of(x, 5), torch.tensor([1, 3]))[:, None]
            * (torch.isin(labels_of(x, 5), 2) + 1)[:, None]
        )
    ),
    "tangent in another layout than its value": split(
        lambda x: torch.func.jvp(lambda value: value.sin(), (x.t().contiguous().t(),), (x.cos(),))[1].square()
    ),
    "gradient of a gamma draw": split(lambda x: x * aten._standard_gamma_grad(x.detach().abs(), x.detach().exp())),
}
