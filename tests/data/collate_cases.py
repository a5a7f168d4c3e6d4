"""Collate functions as people write them: some make each row from its sample alone, others need the whole batch."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import Dataset, default_collate


class Sequences(Dataset[Any]):
    """Sequences of several lengths; `lengths` are repeated. The data set counts what was read."""

    def __init__(self, rows: int = 22, lengths: tuple[int, ...] = (3, 5, 2, 7, 4, 6, 1)) -> None:
        self.rows = rows
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        length = self.lengths[index % len(self.lengths)]
        return {
            "x": torch.arange(length, dtype=torch.float64) + index,
            "ids": [index + offset for offset in range(length)],
            "image": torch.full((2, 3), float(index), dtype=torch.float64),
            "label": index % 3,
            "name": f"file {index}",
        }


class SomeMissing(Sequences):
    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return None if index in (1, 9, 13) else sample


class Augmented(Sequences):
    """Random augmentation from all three generators."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        noise = torch.rand(2, 3, dtype=torch.float64) + numpy.random.rand() + random.random()
        return sample | {"image": sample["image"] + noise}


def stack_images(samples: list[Any]) -> dict[str, Any]:
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
        "name": [sample["name"] for sample in samples],
    }


def pad_to_fixed(samples: list[Any]) -> tuple[Any, Any]:
    rows = torch.zeros(len(samples), 9, dtype=torch.float64)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample["x"])] = sample["x"]
    return rows, tuple(sample["name"] for sample in samples)


def change_samples(samples: list[Any]) -> dict[str, Any]:
    """Take parts out of the samples, as collators of labels do."""
    names = [sample.pop("name") for sample in samples]
    return {"label": torch.tensor([sample.pop("label") for sample in samples]), "name": names}


def collate_default(samples: list[Any]) -> Any:
    return default_collate([{"image": sample["image"], "label": sample["label"]} for sample in samples])


def flag_lengths(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([[len(sample["x"]) > 3, True] for sample in samples])


ROW_WISE: dict[str, Callable[[Any], Any]] = {
    "stack": stack_images,
    "pad to fixed": pad_to_fixed,
    "change samples": change_samples,
    "default": collate_default,
    "booleans": flag_lengths,
    "lambda": lambda samples: torch.stack([sample["image"].T for sample in samples]),
}


def pad_longest(samples: list[Any]) -> tuple[Any, Any]:
    return pad_sequence([sample["x"] for sample in samples], batch_first=True), [sample["label"] for sample in samples]


def pad_time_first(samples: list[Any]) -> Any:
    return pad_sequence([sample["x"] for sample in samples])


def pad_and_measure(samples: list[Any], *, key: str = "x") -> dict[str, Any]:
    lengths = [len(sample[key]) for sample in samples]
    return {"x": pad_longest(samples)[0], "lengths": torch.tensor(lengths), "longest": max(lengths)}


def sort_by_length(samples: list[Any]) -> Any:
    ordered = sorted(samples, key=lambda sample: len(sample["x"]), reverse=True)
    return torch.stack([sample["image"] for sample in ordered]), torch.tensor([len(one["x"]) for one in ordered])


def pack(samples: list[Any]) -> Any:
    return pack_sequence([sample["x"] for sample in samples], enforce_sorted=False)


def drop_missing(samples: list[Any]) -> Any:
    present = [sample for sample in samples if sample is not None]
    return torch.stack([sample["image"] for sample in present]), [sample["name"] for sample in present]


def subtract_mean(samples: list[Any]) -> Any:
    rows = torch.stack([sample["image"] for sample in samples])
    return rows - rows.mean(dim=0)


def relative_lengths(samples: list[Any]) -> Any:
    lengths = torch.tensor([len(sample["x"]) for sample in samples], dtype=torch.float64)
    return lengths / lengths.max()


def count_samples(samples: list[Any]) -> Any:
    return torch.stack([sample["image"] for sample in samples]), len(samples)


def constant_text(samples: list[Any]) -> Any:
    return {"image": torch.stack([sample["image"] for sample in samples]), "task": "regression"}


def scalar_mean(samples: list[Any]) -> Any:
    rows = torch.stack([sample["image"] for sample in samples])
    return rows, rows.mean()


def images_in_a_tuple(samples: list[Any]) -> Any:
    return tuple(sample["x"] for sample in samples), [{"label": sample["label"]} for sample in samples]


def flatten_graph(samples: list[Any]) -> Any:
    """Concatenate nodes, and number the sample of each, as graph libraries do."""
    owners = [torch.full((len(sample["x"]),), row) for row, sample in enumerate(samples)]
    return torch.cat([sample["x"] for sample in samples]), torch.cat(owners)


def number_rows(samples: list[Any]) -> Any:
    return torch.arange(len(samples)), torch.stack([sample["image"] for sample in samples])


def in_batch_negatives(samples: list[Any]) -> Any:
    rows = torch.stack([sample["image"] for sample in samples])
    return rows, rows.roll(1, 0)


def to_arrays(samples: list[Any]) -> Any:
    return numpy.stack([sample["image"].numpy() for sample in samples])


def refuse_small(samples: list[Any]) -> Any:
    if len(samples) < 2:
        raise ValueError("a batch needs pairs")
    return torch.stack([sample["image"] for sample in samples])


class Counting:
    """A collator with state: how many batches it has made."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        return torch.stack([sample["image"] for sample in samples]) * self.batches


NEEDS_WHOLE: dict[str, Callable[[Any], Any]] = {
    "pad longest": pad_longest,
    "pad time first": pad_time_first,
    "pad and measure": functools.partial(pad_and_measure, key="ids"),
    "sort by length": sort_by_length,
    "pack": pack,
    "subtract mean": subtract_mean,
    "relative lengths": relative_lengths,
    "count": count_samples,
    "constant text": constant_text,
    "scalar": scalar_mean,
    "tuple of images": images_in_a_tuple,
    "graph": flatten_graph,
    "number rows": number_rows,
    "negatives": in_batch_negatives,
    "arrays": to_arrays,
    "pairs only": refuse_small,
}


def mix_up(samples: list[Any]) -> Any:
    rows, share = torch.stack([sample["image"] for sample in samples]), numpy.random.beta(0.4, 0.4)
    return share * rows + (1 - share) * rows[torch.randperm(len(rows))], share


def cut_mix(samples: list[Any]) -> Any:
    rows = torch.stack([sample["image"] for sample in samples])
    column = random.randrange(rows.shape[-1])
    rows[..., column] = rows.flip(0)[..., column]
    return rows


def mask_tokens(samples: list[Any]) -> Any:
    """Mask at random, row by row: rows are independent, but the numbers come from one generator."""
    rows = pad_to_fixed(samples)[0]
    return rows.masked_fill(torch.rand(rows.shape) < 0.3, -1.0)


class MixWithOwnGenerator:
    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(4)

    def __call__(self, samples: list[Any]) -> Any:
        rows = torch.stack([sample["image"] for sample in samples])
        return rows * float(self.generator.random())


def mix_with_closure() -> Callable[[Any], Any]:
    generator = torch.Generator().manual_seed(5)

    def mix(samples: list[Any]) -> Any:
        rows = torch.stack([sample["image"] for sample in samples])
        return rows[torch.randperm(len(rows), generator=generator)]

    return mix


DRAWS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "mixup": lambda: mix_up,
    "cutmix": lambda: cut_mix,
    "mask": lambda: mask_tokens,
    "own generator": MixWithOwnGenerator,
    "closure": mix_with_closure,
    "counter": Counting,
}
"""Makers of collate functions with random numbers or state, a new one for each run."""
