"""A padding collator of transformers pads the whole batch, on several ranks too."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from data.loader_cases import seed_all_generators
from data.test_collation_probe import make_loader, read_twice
from support.processes import on_mesh
from torch.utils.data import DataLoader

from rankless.data.logical_tensor import LogicalTensor
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow


@functools.cache
def make_bert_collator() -> Callable[[list[Any]], Any]:
    transformers = pytest.importorskip("transformers")  # here, because its import takes seconds in each test process
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
    return transformers.DataCollatorWithPadding(transformers.BertTokenizerFast(vocab=vocabulary), return_tensors="pt")


TOKENS = [{"input_ids": [5 + number % 2] * (number % 5 + 1), "labels": number % 3} for number in range(13)]


def read_tokens(mesh: Mesh) -> tuple[list[Any], list[str], bool]:
    seed_all_generators()
    loader, notices = make_loader(mesh, TOKENS, batch_size=5, shuffle=True, collate_fn=make_bert_collator())
    (first, *_) = loader
    return read_twice(loader), notices, isinstance(first["input_ids"], LogicalTensor)


def test_a_padding_collator_of_transformers_pads_the_whole_batch():
    seed_all_generators()
    plain = DataLoader(TOKENS, 5, shuffle=True, collate_fn=make_bert_collator())
    list(plain)
    expected = read_twice(plain)
    for found, notices, is_logical in on_mesh(2, read_tokens):
        assert found == expected
        assert len(notices) == 1
        assert is_logical
