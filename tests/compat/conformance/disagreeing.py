"""Mismatched ranks raise the same error with the same text on every rank, and continue afterwards."""

import horovod.torch as hvd
import torch
from raised import raised


def agree_on(text: str) -> None:
    """Every rank has got this text, and operations go on."""
    assert set(hvd.allgather_object(text)) == {text}
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def is_odd() -> bool:
    return hvd.rank() == hvd.size() - 1


def check_shapes():
    """Mismatched ALLREDUCE tensor shapes."""
    for few, many in ((3, 4), (30_000, 40_000)):
        given = torch.ones(many if is_odd() else few)
        text = raised(hvd.HorovodInternalError, lambda given=given: hvd.allreduce(given, name="shapes"))
        assert text == (
            f"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [{few}], "
            f"but another rank sent a tensor of shape [{many}]."
        )
        agree_on(text)


def check_types():
    """Mismatched data types."""
    given = torch.ones(3, dtype=torch.float64 if is_odd() else torch.float32)
    text = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(given, name="types"))
    assert text == "Mismatched data types: One rank had type float32, but another rank had type float64."
    agree_on(text)


def check_reductions():
    """Mismatched reduction operation."""
    op = hvd.Min if is_odd() else hvd.Sum
    text = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(3), op=op, name="ops"))
    assert text == "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 3."
    agree_on(text)


def check_factors():
    """Mismatched prescale and/or postscale factors."""
    factor = 2.0 if is_odd() else 1.0
    call = lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=factor, name="factors")  # noqa: E731
    text = raised(hvd.HorovodInternalError, call)
    assert text == (
        "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), "
        "but another rank sent factors (2, 1)."
    )
    agree_on(text)


def check_roots():
    """Mismatched BROADCAST root ranks."""
    root = 1 if is_odd() else 0
    text = raised(hvd.HorovodInternalError, lambda: hvd.broadcast(torch.ones(3), root, name="roots"))
    assert text == (
        "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1."
    )
    agree_on(text)


def check_dims_to_be_gathered():
    """Mismatched ALLGATHER tensor shapes, by rank and by dimension."""
    given = torch.ones(2) if is_odd() else torch.ones(2, 3)
    text = raised(hvd.HorovodInternalError, lambda: hvd.allgather(given, name="dims"))
    assert text == (
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, "
        "but another rank sent a tensor of rank 1."
    )
    agree_on(text)
    given = torch.ones(2, 4) if is_odd() else torch.ones(2, 3)
    text = raised(hvd.HorovodInternalError, lambda: hvd.allgather(given, name="sizes"))
    assert text == (
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, "
        "but another rank sent a tensor with dimension 1 equal to 4."
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
        "but another rank sent a tensor of shape [40001]."
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
