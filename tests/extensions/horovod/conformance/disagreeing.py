"""Mismatched ranks raise the same error with the same text on every rank, and continue afterwards."""

import horovod.torch as hvd
import torch
from raised import raised


def agree_on(text: str) -> None:
    """Every rank has got this text, and operations go on."""
    assert set(hvd.allgather_object(text)) == {text}
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def suffix(key: str) -> str:
    """What follows Horovod's text: the operation and the ranks. The last rank is the odd one."""
    others = ", ".join(map(str, range(hvd.size() - 1)))
    plural = "s" if hvd.size() > 2 else ""
    return f" Operation {key}: the first is rank{plural} {others}, the other rank {hvd.size() - 1}."


def is_odd() -> bool:
    return hvd.rank() == hvd.size() - 1


def check_shapes():
    """Mismatched ALLREDUCE tensor shapes."""
    for few, many in ((3, 4), (30_000, 40_000)):
        given = torch.ones(many if is_odd() else few)
        text = raised(hvd.HorovodInternalError, lambda given=given: hvd.allreduce(given, name="shapes"))
        assert text == (
            f"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [{few}], "
            f"but another rank sent a tensor of shape [{many}]." + suffix("allreduce.shapes")
        )
        agree_on(text)


def check_types():
    """Mismatched data types."""
    given = torch.ones(3, dtype=torch.float64 if is_odd() else torch.float32)
    text = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(given, name="types"))
    expected = "Mismatched data types: One rank had type float32, but another rank had type float64."
    assert text == expected + suffix("allreduce.types")
    agree_on(text)


def check_reductions():
    """Mismatched reduction operation."""
    op = hvd.Min if is_odd() else hvd.Sum
    text = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(3), op=op, name="ops"))
    expected = "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 3."
    assert text == expected + suffix("allreduce.ops")
    agree_on(text)


def check_factors():
    """Mismatched prescale and/or postscale factors."""
    factor = 2.0 if is_odd() else 1.0
    call = lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=factor, name="factors")  # noqa: E731
    text = raised(hvd.HorovodInternalError, call)
    assert text == (
        "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), "
        "but another rank sent factors (2, 1)." + suffix("allreduce.factors")
    )
    agree_on(text)


def check_roots():
    """Mismatched BROADCAST root ranks."""
    root = 1 if is_odd() else 0
    text = raised(hvd.HorovodInternalError, lambda: hvd.broadcast(torch.ones(3), root, name="roots"))
    assert text == (
        "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1."
        + suffix("broadcast.roots")
    )
    agree_on(text)


def check_dims_to_be_gathered():
    """Mismatched ALLGATHER tensor shapes, by rank and by dimension."""
    given = torch.ones(2) if is_odd() else torch.ones(2, 3)
    text = raised(hvd.HorovodInternalError, lambda: hvd.allgather(given, name="dims"))
    assert text == (
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, "
        "but another rank sent a tensor of rank 1." + suffix("allgather.dims")
    )
    agree_on(text)
    given = torch.ones(2, 4) if is_odd() else torch.ones(2, 3)
    text = raised(hvd.HorovodInternalError, lambda: hvd.allgather(given, name="sizes"))
    assert text == (
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, "
        "but another rank sent a tensor with dimension 1 equal to 4." + suffix("allgather.sizes")
    )
    agree_on(text)


def check_the_error_comes_from_synchronize():
    """Handing in works; poll() says that it is done; synchronize() raises, once."""
    handle = hvd.allreduce_async(torch.ones(4 if is_odd() else 3), name="later")
    while not hvd.poll(handle):
        pass
    text = raised(hvd.HorovodInternalError, lambda: hvd.synchronize(handle))
    assert text.startswith("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3]")
    assert hvd.synchronize(handle) is None
    agree_on(text)


def check_a_group_of_which_one_member_does_not_fit():
    """The whole group fails, on every rank."""
    given = [torch.ones(3), torch.ones(40_001 if is_odd() else 40_000)]
    text = raised(hvd.HorovodInternalError, lambda: hvd.grouped_allreduce(given, name="group"))
    assert text == (
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [40000], "
        "but another rank sent a tensor of shape [40001]." + suffix("grouped_allreduce.group_2of2")
    )
    agree_on(text)


def check_an_error_before_and_a_result_after_under_the_same_name():
    """A name that has failed may be used again."""
    for number in range(3):
        given = torch.ones(4 if is_odd() else 3)
        raised(hvd.HorovodInternalError, lambda given=given: hvd.allreduce(given, name="again"))
        found = hvd.allreduce(torch.full((3,), float(number)), op=hvd.Sum, name="again")
        assert found.tolist() == [number * hvd.size()] * 3


def check_a_shape_that_changes_everywhere():
    """Another shape under the same name is nothing wrong, if all ranks change it."""
    for count in (3, 40_000, 5, 40_001, 3):
        assert hvd.allreduce(torch.ones(count), op=hvd.Sum, name="growing").sum().item() == count * hvd.size()


def both_wait(text: str, first: str, other: str) -> None:
    """The error of ranks that wait for each other names both operations and their ranks."""
    assert f"waits in {first}, which rank" in text or f"wait in {first}, which rank" in text, text
    assert f"waits in {other}, which rank" in text or f"wait in {other}, which rank" in text, text
    assert "has not submitted" in text or "have not submitted" in text, text
    agree_on(text)


def check_another_kind_under_the_same_name():
    """Ranks that wait for each other in operations of two kinds get an error, and never hang."""
    call = (
        (lambda: hvd.broadcast(torch.ones(3), 0, name="kind"))
        if is_odd()
        else (lambda: hvd.allreduce(torch.ones(3), name="kind"))
    )
    both_wait(raised(hvd.HorovodInternalError, call), "allreduce.kind", "broadcast.kind")


def check_groups_of_other_sizes():
    """So do ranks with groups of other sizes."""
    given = [torch.ones(40_000)] * (3 if is_odd() else 2)
    text = raised(hvd.HorovodInternalError, lambda: hvd.grouped_allreduce(given, name="sizes"))
    both_wait(text, "grouped_allreduce.sizes_1of2", "grouped_allreduce.sizes_1of3")


def check_two_kinds_under_one_name_in_any_order():
    """Two kinds may use one name at once: ranks that submit both, each in its own order, get both results."""
    calls = [
        lambda: hvd.allreduce_async(torch.ones(3), name="two"),
        lambda: hvd.broadcast_async(torch.ones(3), 0, name="two"),
    ]
    handles = [call() for call in (calls[::-1] if is_odd() else calls)]
    assert [hvd.synchronize(handle).tolist() for handle in handles] == [[1.0] * 3] * 2


def check_a_call_that_one_rank_refuses():
    """An error for one rank is an error for all, in the same operation; named or not, alone or in a group."""
    ones, strided = torch.ones(4, 2), torch.ones(2, 4).t()
    given = strided if is_odd() else ones
    for key, call in {
        "allreduce.refused": lambda: hvd.allreduce(given, name="refused"),
        "allgather.noname.": lambda: hvd.allgather(given),
        "grouped_allreduce.refused_": lambda: hvd.grouped_allreduce([given, ones], name="refused"),
        "alltoall.refused": lambda: hvd.alltoall(
            torch.ones(hvd.size()), torch.full((hvd.size(),), 2 if is_odd() else 1, dtype=torch.int32), name="refused"
        ),
        "allgather.scalar": lambda: hvd.allgather(torch.ones(() if is_odd() else (1,)), name="scalar"),
    }.items():
        if is_odd():
            raised((ValueError, IndexError), call)
        else:
            text = raised(hvd.HorovodInternalError, call)
            assert text.startswith(key), text
            assert f" was refused by rank {hvd.size() - 1}: " in text, text
        assert hvd.allreduce(ones, op=hvd.Sum)[0, 0].item() == hvd.size()
        assert hvd.allreduce(ones, op=hvd.Sum, name="refused")[0, 0].item() == hvd.size()


def check_a_call_that_all_ranks_refuse():
    """It leaves nothing behind, and neither does one that only one rank makes, after a barrier."""
    strided = torch.ones(2, 4).t()
    for refuses in (True, is_odd()):
        if refuses:
            raised(ValueError, lambda: hvd.allreduce(strided, name="all"))
        hvd.barrier()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="all").tolist() == [hvd.size()] * 2


def check_tensors_without_values():
    """A meta tensor is refused for what it is."""
    text = raised(ValueError, lambda: hvd.allreduce(torch.ones(2, device="meta"), name="meta"))
    assert "found:    one on the device meta" in text
