"""Lookups of a table: ids of all shapes, types, admission, and what remains when a model is gone."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from rankless.errors import TableError
from rankless.parameter_server import ByCount, Embedding

pytestmark = pytest.mark.usefixtures("float64_by_default")


def test_the_padding_id_reads_as_zeros_and_is_not_trained():
    embedding = Embedding(3, padding_idx=-1)
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    rows = embedding(torch.tensor([[4, -1], [-1, 5]]))
    assert (rows[0, 1] == 0).all()
    assert (rows[0, 0] != 0).all()
    rows.sum().backward()
    optimizer.step()
    assert embedding.statistics().rows == 2
    assert (embedding(torch.tensor(-1)) == 0).all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_have_any_shape_and_integer_type(shape, dtype):
    embedding = Embedding(4)
    ids = torch.randint(-9, 9, shape).to(dtype)
    rows = embedding(ids)
    assert rows.shape == (*shape, 4)
    rows.sum().backward()
    torch.optim.SGD(embedding.parameters(), 1.0).step()
    torch.testing.assert_close(embedding(ids).shape, rows.shape)
    assert embedding.statistics().rows == len(ids.unique())


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16)])
def test_ids_of_other_types_are_refused(ids):
    with pytest.raises(TableError, match=r"ids\.to\(torch\.int64\)"):
        Embedding(4)(ids)


def test_rows_that_do_not_lie_in_order_have_their_own_gradients():
    embedding, ids = Embedding(2), torch.tensor([[1, 2], [2, 3], [3, 1]])
    before = embedding(torch.tensor([1, 2, 3])).detach()
    weights = torch.tensor([[1.0, 10.0], [100.0, 1000.0], [10000.0, 100000.0]]).t()
    (embedding(ids.t()).transpose(0, 1).permute(1, 0, 2) * weights[..., None]).sum().backward()
    torch.optim.SGD(embedding.parameters(), 1.0).step()
    moved = (before - embedding(torch.tensor([1, 2, 3])).detach())[:, 0]
    torch.testing.assert_close(moved, torch.tensor([100001.0, 110.0, 11000.0]), rtol=1e-9, atol=0)


def test_the_type_follows_the_model_until_it_has_trained():
    model = nn.Sequential(Embedding(4, dtype=torch.float32, seed=1))
    single = model(torch.arange(5))
    double = model.double()(torch.arange(5))
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-6)
    double.sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(TableError, match="before its first training step"):
        model.float()(torch.arange(5))
    with pytest.raises(TableError, match=r"float32 or torch\.float64"):
        model.half()(torch.arange(5))


def test_the_seed_comes_from_the_generator_of_the_script():
    torch.manual_seed(3)
    first = Embedding(4)(torch.arange(3))
    second = Embedding(4)(torch.arange(3))
    torch.manual_seed(3)
    assert torch.equal(first, Embedding(4)(torch.arange(3)))
    assert not torch.equal(first, second)


def test_evaluation_makes_no_rows():
    embedding = Embedding(4)
    with torch.no_grad():
        embedding(torch.arange(100))
    with torch.inference_mode():
        embedding(torch.arange(100))
    assert embedding.statistics().rows == 0


def test_a_model_that_is_gone_leaves_no_memory_and_no_more_hooks():
    embedding = Embedding(4)
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    embedding(torch.arange(3)).sum().backward()
    optimizer.step()
    gc.collect()
    hooks = len(optimizers._global_optimizer_post_hooks)
    table = weakref.ref(embedding._table)
    del embedding, optimizer
    gc.collect()
    assert table() is None
    Embedding(4)(torch.arange(3)).sum().backward()
    assert len(optimizers._global_optimizer_post_hooks) == hooks


def test_admission_counts_each_occurrence_once():
    embedding = Embedding(2, admission=ByCount(occurrences=4))
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    embedding(torch.tensor([8, 8, 8])).sum().backward()
    optimizer.step()
    optimizer.step()  # the same gradient again: no further occurrences
    assert embedding.statistics().rows == 0
    optimizer.zero_grad()
    embedding(torch.tensor([8])).sum().backward()
    optimizer.step()
    assert embedding.statistics().rows == 1
