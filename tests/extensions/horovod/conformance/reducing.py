"""Allreduce in all its forms."""

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor
from raised import raised

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (0,), (1,), (17,), (4, 5, 6), (70_001,))
"""The last is too large to be sent inline."""


def own(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 5 + 1).reshape(shape).to(dtype)


def of_all(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([own(shape, dtype, rank) for rank in range(hvd.size())])


def check_every_type_and_shape():
    """Sum, Min, Max and Product of every type and shape."""
    for dtype in FLOATS + INTEGERS:
        for shape in SHAPES:
            given = own(shape, dtype, hvd.rank())
            whole = of_all(shape, torch.float64)
            assert torch.equal(hvd.allreduce(given, op=hvd.Sum).double(), whole.sum(0)), (dtype, shape)
            assert torch.equal(hvd.allreduce(given, op=hvd.Min).double(), whole.amin(0)), (dtype, shape)
            assert torch.equal(hvd.allreduce(given, op=hvd.Max).double(), whole.amax(0)), (dtype, shape)
            if dtype not in (torch.int8, torch.uint8, torch.bfloat16, torch.float16):
                assert torch.equal(hvd.allreduce(given, op=hvd.Product).double(), whole.prod(0)), (dtype, shape)


def check_average_is_the_default():
    """allreduce() averages; average= is the older way to say so."""
    given = own((9,), torch.float64, hvd.rank())
    mean, total = of_all((9,), torch.float64).mean(0), of_all((9,), torch.float64).sum(0)
    torch.testing.assert_close(hvd.allreduce(given), mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(hvd.allreduce(given, average=True), mean, rtol=1e-15, atol=0)
    assert torch.equal(hvd.allreduce(given, average=False), total)
    expected = "The op parameter supersedes average. Please provide only one of them."
    assert raised(ValueError, lambda: hvd.allreduce(given, average=True, op=hvd.Sum)) == expected


def check_an_average_of_integers_truncates_toward_zero():
    """[1, 2, -3] and [2, 3, -2] give [1, 2, -2]."""
    for repeat in (1, 20_000):
        given = torch.tensor([1, 2, -3] if hvd.rank() == 0 else [2, 3, -2]).repeat(repeat)
        others = hvd.size() - 1
        total = torch.tensor([1 + 2 * others, 2 + 3 * others, -3 - 2 * others])
        expected = torch.div(total, hvd.size(), rounding_mode="trunc").repeat(repeat)
        assert torch.equal(hvd.allreduce(given), expected)


def check_factors_before_and_after():
    """prescale_factor and postscale_factor."""
    for count in (5, 50_000):
        given = own((count,), torch.float64, hvd.rank())
        found = hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        torch.testing.assert_close(found, of_all((count,), torch.float64).sum(0) * 1.5, rtol=1e-14, atol=0)


def check_in_place_and_asynchronous_forms():
    """allreduce_, allreduce_async, allreduce_async_; poll and synchronize; an unknown handle gives None."""
    for count in (5, 50_000):
        given = own((count,), torch.float64, hvd.rank())
        total = of_all((count,), torch.float64).sum(0)
        kept = given.clone()
        handle = hvd.allreduce_async(given, op=hvd.Sum, name=f"async.{count}")
        result = hvd.synchronize(handle)
        assert torch.equal(result, total)
        assert torch.equal(given, kept)
        handle = hvd.allreduce_async_(given, op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is given
        assert torch.equal(given, total)
        again = kept.clone()
        assert hvd.allreduce_(again, op=hvd.Sum) is again
        assert torch.equal(again, total)
        assert hvd.synchronize(handle) is None
        expected = f"Handle {handle} was not created or has been cleared."
        assert raised(ValueError, lambda handle=handle: hvd.poll(handle)) == expected
    assert hvd.synchronize(10**9) is None


def check_orders_of_named_tensors_may_differ():
    """Ranks may submit named tensors in any order."""
    names = [f"name.{number}" for number in range(24)]
    order = names[hvd.rank() :] + names[: hvd.rank()]
    handles = {}
    for name in order:
        number = names.index(name)
        handles[name] = hvd.allreduce_async(torch.full((number * 999 + 1,), float(number)), name=name, op=hvd.Sum)
    for number, name in enumerate(names):
        assert hvd.synchronize(handles[name])[-1].item() == number * hvd.size()


def check_one_name_for_two_operations():
    """The same name in an allreduce and in a broadcast does not collide."""
    first = hvd.allreduce_async(torch.ones(3), name="shared", op=hvd.Sum)
    second = hvd.broadcast_async(torch.full((3,), float(hvd.rank())), 0, name="shared")
    assert hvd.synchronize(first)[0].item() == hvd.size()
    assert hvd.synchronize(second)[0].item() == 0.0


def check_a_name_that_is_being_processed():
    """A second tensor of a name that is under way is refused."""
    tensors = [torch.ones(3), torch.ones(3)]
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(tensors[0], name="twice", op=hvd.Sum)
        text = raised(ValueError, lambda: hvd.allreduce_async(tensors[1], name="twice", op=hvd.Sum))
        assert text == (
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
            "currently being processed.  If you want to request another tensor, use a different tensor name."
        )
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(tensors[0], name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle)[0].item() == hvd.size()
    hvd.barrier()
    hvd.shutdown()  # rank 0 has counted one call more, by which unnamed operations are named
    hvd.init()


def check_groups():
    """grouped_allreduce gives a result for each, in all its forms, of mixed sizes."""
    given = [own((count,), torch.float64, hvd.rank()) for count in (3, 40_000, 1)]
    totals = [of_all((count,), torch.float64).sum(0) for count in (3, 40_000, 1)]
    for found in (
        hvd.grouped_allreduce(given, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Sum, name="group")),
        hvd.grouped_allreduce_([one.clone() for one in given], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async_([one.clone() for one in given], op=hvd.Sum)),
    ):
        assert all(torch.equal(one, total) for one, total in zip(found, totals, strict=True))


def check_groups_of_several_types():
    """Each tensor of a group is reduced in its own type, whichever comes first."""
    for count in (3, 30_000):
        given = [
            torch.full((count,), 0.5),
            torch.full((count,), 2**40 + 1),
            torch.full((count,), 1 / 3, dtype=torch.float64),
        ]
        for order in (given, given[::-1]):
            for found, one in zip(hvd.grouped_allreduce(order, op=hvd.Max), order, strict=True):
                assert torch.equal(found, one), one.dtype


def check_gradients_of_allreduce():
    """The gradient of an allreduce is an allreduce by the same operation."""
    for op in (hvd.Sum, hvd.Average):
        given = own((5,), torch.float64, hvd.rank()).requires_grad_()
        weights = own((5,), torch.float64, hvd.rank() + 7)
        (hvd.allreduce(given, op=op) * weights).sum().backward()
        everyones = torch.stack([own((5,), torch.float64, rank + 7) for rank in range(hvd.size())])
        expected = everyones.sum(0) if op == hvd.Sum else everyones.mean(0)
        torch.testing.assert_close(given.grad, expected, rtol=1e-14, atol=0)


def check_gradients_of_groups():
    """And of a grouped one, for each."""
    given = [torch.full((count,), 2.0, requires_grad=True) for count in (2, 3)]
    first, second = hvd.grouped_allreduce(given, op=hvd.Sum)
    (first.sum() + 3 * second.sum()).backward()
    assert given[0].grad.tolist() == [float(hvd.size())] * 2
    assert given[1].grad.tolist() == [3.0 * hvd.size()] * 3


def check_compression():
    """fp16 goes over the wire as halves and comes back as it was; none changes nothing; users may write their own."""
    exact = torch.tensor([1.0 + 2**-12])  # which no half is
    assert hvd.allreduce(exact).item() == exact.item()
    assert hvd.allreduce(exact, compression=hvd.Compression.fp16).item() == 1.0
    assert hvd.grouped_allreduce([exact], compression=hvd.Compression.fp16)[0].item() == 1.0

    class Negated(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
            return -tensor, "negated"

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: str) -> torch.Tensor:
            assert ctx == "negated"
            return -tensor

    highest = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Max, compression=Negated)
    assert highest.item() == 0.0  # the highest of those that have travelled
    given = own((40_000,), torch.float32, hvd.rank())
    found = hvd.allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert found.dtype is torch.float32
    assert torch.equal(found, of_all((40_000,), torch.float32).sum(0))
    compressed, context = hvd.Compression.fp16.compress(given)
    assert (compressed.dtype, context) == (torch.float16, torch.float32)
    assert hvd.Compression.none.compress(given) == (given, None)


def check_what_is_not_contiguous_is_refused():
    """And bfloat16 and bool, which Horovod refuses, are taken."""
    text = raised(ValueError, lambda: hvd.allreduce_(torch.ones(4, 4).t()))
    assert text == "Tensor is required to be contiguous."
    assert hvd.allreduce(torch.full((3,), 1.5).bfloat16(), op=hvd.Sum).tolist() == [1.5 * hvd.size()] * 3
    text = raised(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)))
    assert text == "Tensor type torch.ComplexFloatTensor is not supported."
    flags = torch.tensor([hvd.rank() == 0, False])
    assert hvd.allreduce(flags, op=hvd.Max).tolist() == [True, False]


def check_sparse_tensors():
    """sparse_allreduce_async gives a callable, which gives the sum or average."""
    indices = torch.tensor([[hvd.rank(), 5]])
    given = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (6,))
    total = hvd.sparse_allreduce_async(given, name="sparse", op=hvd.Sum)().to_dense()
    assert total.tolist()[5] == 2.0 * hvd.size()
    assert total.tolist()[: hvd.size()] == [1.0] * hvd.size()
    mean = hvd.sparse_allreduce_async(given, name="sparse", op=hvd.Average)().to_dense()
    torch.testing.assert_close(mean, total / hvd.size())


def check_adaptive_summation():
    """Adasum averages what points the same way and adds what stands at right angles; ranks must be a power of 2."""
    size, rank = hvd.size(), hvd.rank()
    if size & (size - 1):
        text = raised(NotImplementedError, lambda: hvd.allreduce(torch.ones(3), op=hvd.Adasum, name="adasum"))
        assert text == "Running Adasum with non-power of 2 ranks is not supported yet."
        return
    alike = hvd.allreduce(torch.full((3,), 2.0, dtype=torch.float64), op=hvd.Adasum)
    torch.testing.assert_close(alike, torch.full((3,), 2.0, dtype=torch.float64))
    apart = torch.zeros(size, dtype=torch.float64)
    apart[rank] = 1.0
    torch.testing.assert_close(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(size, dtype=torch.float64))
