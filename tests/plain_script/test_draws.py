"""Random numbers for the rows of a batch are divided, and those of one device."""

import threading
from typing import Any

import torch
from support.processes import on_mesh
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankless.context.world import World
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import DividedTensor, LogicalView
from rankless.parallel.mesh import Mesh
from rankless.plain_script.batch_random_draws import divide_draws
from rankless.plain_script.loaders import divide_batches


def draw(rows: int) -> dict[str, Tensor]:
    """Return draws by name, in a script that has a batch of so many rows."""
    generator = torch.Generator().manual_seed(5)
    found = {
        "randn": torch.randn(rows, 3, dtype=torch.float64),
        "rand": torch.rand([rows], dtype=torch.float64),
        "randint": torch.randint(0, 9, (rows,)),
        "normal": torch.normal(0.0, 1.0, (rows, 2), generator=generator),
        "distribution": torch.distributions.Normal(0.0, 1.0).sample((rows, 2)),
        "other rows": torch.randn(rows + 1, 3),
        "number": torch.randn(()),
        "leaf": torch.randn(rows, requires_grad=True),
        "given": torch.randn(rows, out=torch.empty(rows)),
        "library's": torch.svd_lowrank(torch.ones(9, rows), 2)[0].abs(),
    }
    thread = threading.Thread(target=lambda: found.update(thread=torch.randn(rows)))
    thread.start()
    thread.join()
    return found


DIVIDED = ("randn", "rand", "randint", "normal", "distribution")


def draw_in_a_loop() -> list[tuple[str, bool, Any]]:
    """Return the name of each draw, whether it is divided, and its values."""
    torch.manual_seed(3)
    before = [draw(5)]
    batches = [draw(len(batch)) for (batch,) in DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=5)]
    drawn = [*before, *batches, draw(2)]
    return [(name, isinstance(item, DividedTensor), item.tolist()) for each in drawn for name, item in each.items()]


def compare(mesh: Mesh) -> list[list[str]]:
    """Return what is divided before, in and after a loop, after a comparison of all values."""
    expected = draw_in_a_loop()
    view = LogicalView(mesh, lambda _: None)
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    with LogicalBackward(view).install(), divide_batches(view, world), divide_draws(view):
        found = draw_in_a_loop()
    assert [(name, values) for name, _, values in found] == [(name, values) for name, _, values in expected]
    return [[name for name, is_divided, _ in found[start : start + 11] if is_divided] for start in range(0, 55, 11)]


def test_draws_for_the_rows_of_a_batch_are_divided_and_equal_one_devices() -> None:
    every = list(DIVIDED)
    assert on_mesh(2, compare) == [[[], every, every, every, []]] * 2
    assert on_mesh(3, compare) == [[[], every, every, [], []]] * 3  # 2 rows on 3 ranks are not divided
