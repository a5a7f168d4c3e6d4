"""Operations of scripts on batches outside jobs: functions of one (7, 5) tensor, plain or logical."""

import copy
import io
import json
import operator
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F

Operation = Callable[[torch.Tensor], Any]


def print_tensor(tensor: torch.Tensor) -> str:
    text = io.StringIO()
    print(tensor, "and", tensor[0], file=text)
    return text.getvalue()


def save_in_dict(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"x": tensor, "y": [tensor[1]]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return loaded["x"], loaded["y"]


def change_in_place(change: Callable[[torch.Tensor], Any]) -> Operation:
    """Return an operation that changes the tensor in place and returns it."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        change(tensor)
        return tensor

    return apply


def write_into_another(shape: tuple[int, ...], change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Operation:
    """Return an operation that changes a plain tensor in place and reads the tensor."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        other = torch.zeros(shape)
        change(other, tensor)
        return other

    return apply


def run_hook(tensor: torch.Tensor) -> Any:
    seen: list[float] = []
    tensor.requires_grad_()
    tensor.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    tensor.square().sum().backward()
    return seen, tensor.grad, tensor.requires_grad, tensor.is_leaf


def seed_first(operation: Operation) -> Operation:
    """Return the operation with torch's generator seeded; the next random number is part of the result."""

    def apply(tensor: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return operation(tensor), torch.rand(1).item()

    return apply


READING: dict[str, Operation] = {
    "print": print_tensor,
    "f-string": lambda t: f"{t.mean():.3f} {t[0, 0]:+.1f} {t!r} {t.shape}",
    "percent": lambda t: "%s %.2f" % (t[0], t.sum()),  # noqa: UP031  # as people still write
    "len and shape": lambda t: (len(t), t.shape[0], t.size(), t.numel(), list(t.shape), t.nbytes),
    "int and float": lambda t: (int(t[0, 0]), float(t.sum()), complex(t[1, 1]), round(t[2, 2].item(), 1)),
    "built-in sum": lambda t: sum(t),
    "built-in max": lambda t: (max(t[0]), min(t[:, 0]).item(), max(t.flatten().tolist())),
    "built-in abs": lambda t: abs(t),
    "sorted": lambda t: sorted(t[:, 2].tolist(), reverse=True),
    "reversed": lambda t: [row.tolist() for row in reversed(t)],
    "enumerate and zip": lambda t: [(i, a[0].item(), b[1].item()) for i, (a, b) in enumerate(zip(t, t, strict=True))],
    "unpacking": lambda t: [first := t[0], *t[1:2], first + 1],
    "statistics": lambda t: statistics.mean(t[:, 0].tolist()),
    "json": lambda t: json.dumps({"rows": t.tolist()}),
    "dictionary key": lambda t: {t[0, 0].item(): "x"}[-11.0],
    "list index": lambda t: ["a", "b", "c"][int(t[2, 2])],
    "any and all": lambda t: (bool((t > 3).any()), bool(torch.all(t < 100)), any(t[0] > 0)),
    "detach cpu numpy": lambda t: t.detach().cpu().numpy(),
    "array with type": lambda t: numpy.asarray(t, dtype=numpy.float64),
    "array copy": lambda t: numpy.array(t).sum(axis=0),
    "numpy functions": lambda t: (numpy.mean(t.numpy()), numpy.vstack([t, t]), numpy.asarray(t)[::2, 1]),
    "numpy operator": lambda t: numpy.ones((7, 5), dtype=numpy.float32) + t.numpy(),
    "dlpack": torch.from_dlpack,
    "as_tensor": lambda t: torch.as_tensor(t),
    "copy of values": lambda t: t.detach().clone(),
    "copy": copy.copy,
    "deepcopy in a dict": lambda t: copy.deepcopy({"x": [t]})["x"][0],
    "pickle 5": lambda t: pickle.loads(pickle.dumps([t, t], protocol=5)),
    "saved in a dict": save_in_dict,
    "storage": lambda t: (t.untyped_storage().nbytes(), t.storage_offset(), t.is_contiguous()),
}

COMPUTING: dict[str, Operation] = {
    "slice": lambda t: t[1:6:2, ..., -1:],
    "index with tensor": lambda t: t[torch.tensor([6, 0, 3])],
    "index of another": lambda t: torch.arange(40.0)[t.long().clamp(min=0)],
    "new dim": lambda t: t[None, :, :, None],
    "boolean of another": lambda t: torch.arange(7)[t[:, 0] > 0],
    "view": lambda t: t.view(-1, 7),
    "flatten": lambda t: t.flatten(),
    "permute": lambda t: t.permute(1, 0).contiguous(),
    "split": lambda t: t.split([3, 4]),
    "chunk": lambda t: torch.chunk(t, 3),
    "unbind": lambda t: t.unbind(1),
    "cat with plain": lambda t: torch.cat([t, torch.ones(2, 5), t[:1]]),
    "stack in a list": lambda t: torch.stack([t, torch.zeros(7, 5), t * 2]),
    "collate": lambda t: torch.utils.data.default_collate([t, t]),
    "pad": lambda t: torch.nn.utils.rnn.pad_sequence([t, t[:3]], batch_first=True),
    "where": lambda t: torch.where(t > 0, t, torch.zeros(())),
    "reflected operators": lambda t: (1 - t, 2 / (t + 0.5), 2 ** t.clamp(max=3), torch.ones(5) @ t.T, t < 5),
    "matmul": lambda t: t @ torch.ones(5, 2),
    "comparison with plain": lambda t: (t == torch.zeros(7, 5), torch.equal(t, t.clone()), torch.allclose(t, t + 1e-9)),
    "operator module": lambda t: operator.add(t, t),
    "topk": lambda t: t.topk(2, dim=0),
    "sort": lambda t: t.sort(dim=1, descending=True).values,
    "unique": lambda t: torch.unique(t.long() // 4, return_counts=True),
    "bincount": lambda t: torch.bincount(t.long().flatten().clamp(min=0)),
    "one hot": lambda t: F.one_hot(t[:, 0].long().clamp(min=0), 30),
    "argmax": lambda t: (t.argmax(dim=1), t.max(dim=0), t.min()),
    "std": lambda t: (t.std(), t.var(dim=0), torch.linalg.norm(t), t.cumsum(0)),
    "like": lambda t: (torch.zeros_like(t), t.new_ones(2), torch.ones(5).expand_as(t), torch.ones(1).type_as(t)),
    "casts": lambda t: (t.half() + 1, t.bool().sum(), t.to(torch.complex64).imag, t.int() // 3, t.long() % 3),
    "vmap": lambda t: torch.vmap(lambda row: row.sum() * 2)(t),
    "autograd": lambda t: torch.autograd.grad((t.requires_grad_() ** 3).sum(), t)[0],
    "hook": run_hook,
    "no grad module": lambda t: torch.nn.Linear(5, 1, bias=False).requires_grad_(False)(t).shape,
    "loss": lambda t: F.cross_entropy(t, t.argmax(dim=1)),
    "random like": seed_first(lambda t: torch.rand_like(t)),
    "dropout": seed_first(lambda t: F.dropout(t, 0.5)),
    "multinomial": seed_first(lambda t: torch.multinomial(t.abs() + 1, 2)),
}

CHANGING: dict[str, Operation] = {
    "add_": change_in_place(lambda t: t.add_(1)),
    "item set": change_in_place(lambda t: t.__setitem__((0, 1), 5.0)),
    "slice set": change_in_place(lambda t: t.__setitem__(slice(1, 3), torch.zeros(5))),
    "mask set": change_in_place(lambda t: t.__setitem__(t > 0, 0.0)),
    "augmented": change_in_place(lambda t: operator.imul(t, 2)),
    "row": change_in_place(lambda t: t[3].fill_(7)),
    "clamp_": change_in_place(lambda t: t.clamp_(0, 3)),
    "copy_": change_in_place(lambda t: t.copy_(torch.ones(7, 5))),
    "index_add_": change_in_place(lambda t: t.index_add_(0, torch.tensor([0, 6]), torch.ones(2, 5))),
    "scatter_": change_in_place(lambda t: t.scatter_(1, torch.zeros(7, 1, dtype=torch.int64), 1.0)),
    "normal_": seed_first(change_in_place(lambda t: t.normal_())),
    "through numpy": change_in_place(lambda t: numpy.negative(t.numpy(), out=t.numpy())),
    "out": change_in_place(lambda t: torch.add(t, 1, out=t)),
    "out of another": write_into_another((7, 5), lambda other, t: torch.exp(t, out=other)),
    "copied into another": write_into_another((7, 5), lambda other, t: other.copy_(t)),
    "assigned to another": write_into_another((9, 5), lambda other, t: other.__setitem__(slice(0, 7), t)),
    "added to another": write_into_another((7, 5), lambda other, t: other.add_(t, alpha=2)),
    "masked assignment": write_into_another((7, 5), lambda other, t: other.__setitem__(t > 0, t[t > 0])),
}
