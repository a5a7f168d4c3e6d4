"""Values keep their types between ranks, and no other types are accepted."""

import dataclasses
import datetime
import decimal
import enum
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from support.processes import on_mesh

from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.context.once_for_all_ranks import call_once
from rankless.context.world import World
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.errors import RanklessError
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard
from rankless.user_code import display_name


class Colour(enum.Enum):
    RED = 1


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    rows: list[int]
    path: Path
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * len(self.rows))


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


class Struct(msgspec.Struct):
    name: str
    parts: tuple[int, ...]


VALUES: list[Any] = [
    None, True, -1, 2**100, -(2**70), 0.1, float("inf"), "ä", b"\x00", 3 + 4j,
    [1, [2]], (1, (2,)), {1, 2}, frozenset({"a"}), {"a": 1, 2: (None,)}, {(1, 2): "tuple as key"},
    OrderedDict(b=1, a=2), Counter("aab"), range(2, 9, 3), slice(None, 3),
    Path("/a/b"), datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.timedelta(1, 2, 3),
    Colour.RED, Point(1, Point("a", None)), Frozen([1], Path("x")), Slotted({"deep": (1,)}), Struct("n", (1, 2)),
    numpy.float32(1.5), numpy.str_("text"), numpy.bool_(True), numpy.datetime64("2026-01-02"),
    torch.Size([2, 3]), torch.float16, torch.device("cpu"),
]  # fmt: skip

ARRAYS: list[Any] = [
    torch.arange(6.0).reshape(2, 3).T, torch.tensor(7), torch.empty(0, 3), torch.ones(2, dtype=torch.bfloat16),
    torch.arange(5).reshape(1, 5)[:, 2],
    torch.tensor([1 + 2j]).conj(), torch.tensor([True]), numpy.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
    numpy.zeros((0, 2)), numpy.array(["a", "bcd"]), numpy.array(5),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_keep_their_type(value):
    found = decode_value(encode_value(value))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
def test_tensors_and_arrays_keep_type_and_content_and_are_writable(value):
    found = decode_value(encode_value([value, value]))[0]
    assert type(found) is type(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tolist() == value.tolist()
    found[...] = found
    if isinstance(value, torch.Tensor):
        assert decode_value(encode_value(torch.ones(1, requires_grad=True))).requires_grad


def test_nan_stays_nan():
    assert numpy.isnan(decode_value(encode_value(float("nan"))))


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, [1, decimal.Decimal(1)], type("Local", (tuple,), {})(), numpy.array([object()]), iter([])],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_typed_form_raises_type_error(value):
    with pytest.raises(TypeError):
        encode_value(value)


def test_a_class_that_other_ranks_cannot_find_raises_type_error():
    @dataclasses.dataclass
    class Inside:
        x: int

    with pytest.raises(TypeError, match="is not defined at the top of its module"):
        encode_value(Inside(1))


def world_of(mesh: Mesh) -> World:
    return World(mesh=mesh, notify=print, send_record=print)


def on_rank_zero(mesh: Mesh) -> list[Any]:
    world = world_of(mesh)
    calls: list[str] = []

    def inner() -> Any:
        calls.append("inner")
        return Point(mesh.rank, Path("p"))

    def outer() -> Any:
        return {"nested": call_once(inner, name="inner", world=world), "tensor": torch.ones(3)}

    result = call_once(outer, name="outer", world=world)
    return [result["nested"], result["tensor"].tolist(), calls]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_once_within_once_calls_its_function_on_rank_zero(size):
    expected = [Point(0, Path("p")), [1.0, 1.0, 1.0]]
    assert on_mesh(size, on_rank_zero) == [[*expected, ["inner"]]] + [[*expected, []]] * (size - 1)


def fail_then_go_on(mesh: Mesh) -> list[str]:
    """Return each rank's view of failures: of the function, of its result, and of a call that needs all ranks."""
    world = world_of(mesh)
    seen = []
    local = torch.ones(1)
    monitor = GatherMonitor(print, world=world)
    placed = LogicalTensor(local, placement=placement(mesh), mesh=mesh, monitor=monitor)
    for function in (lambda: {}["x"], lambda: object(), lambda: placed.sum().item(), lambda: torch.zeros(1 << 20)):
        try:
            seen.append(str(call_once(function, name="it", world=world).shape))
        except (RanklessError, KeyError) as error:
            seen.append(f"{type(error).__name__}: {getattr(error, 'found', error)}")
    return [*seen, str(placed.sum().item())]


def placement(mesh: Mesh) -> Shard:
    return Shard(0, (1,) * mesh.size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_failure_on_rank_zero_raises_on_all_and_the_ranks_stay_in_step(size):
    first, *others = on_mesh(size, fail_then_go_on)
    for other in others:
        assert other == first
    assert first[:2] == ["KeyError: 'x'", "RanklessError: a builtins.object"]
    assert first[2].startswith(f"RanklessError: an operation on a whole batch at {display_name(__file__)}")
    assert first[3:] == ["torch.Size([1048576])", f"{float(size)}"]


def test_the_names_of_files_that_are_not_utf8_arrive_as_they_were():
    name = "caf\udce9.png"
    value = {name: [name, Path(name)], "é\0": ("\ud800",)}
    assert decode_value(encode_value(value)) == value
