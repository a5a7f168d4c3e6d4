"""Changes in place through views, arrays and copies that share memory, on one (7, 5) batch; and leaves of the batch.

Each returns what a script could see.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = Callable[[Tensor], Any]


def take_copy(batch: Tensor) -> Tensor:
    """Return a batch without gradients that a case may change."""
    return batch.detach().clone()


def set_through_a_view(batch: Tensor) -> Any:
    values = take_copy(batch)
    flat = values.view(-1)
    flat[2] = 9
    total = values.sum()
    values.add_(torch.ones(5))
    flat[-1] = 2
    return values, flat, total, values.tolist()


def change_data(batch: Tensor) -> Any:
    values = take_copy(batch)
    first = values.tolist()
    values.data.add_(1)
    second = values[0, 0].item()
    values.data[0] = 5
    values.detach()[1] = 7
    return first, second, values, values.tolist()


def change_rows_of_views_that_are_gone(batch: Tensor) -> Any:
    values = take_copy(batch)
    row, rows, number = values.detach()[0], values.data[1:3], values.view(-1)[12]
    row.mul_(2)
    rows.mul_(3)
    number.fill_(9)
    seen = values * 1
    values.mul_(0.5)
    return seen, values, row, rows, number


def change_rows_and_wholes(batch: Tensor) -> Any:
    values = take_copy(batch)
    row = values[1]
    values.data.add_(1)
    row.mul_(2)
    column = values.t()
    column[0] += 1
    column.mul_(2)
    for each, label in zip(values, range(7), strict=True):
        each[label % 5] = -1
    rows = list(values)
    values.add_(3)
    return values, row, column, rows


def change_arrays(batch: Tensor) -> Any:
    values = take_copy(batch)
    array, of_row = values.numpy(), values[2].numpy()
    array[0] = 1
    values.add_(1)
    of_row += 7
    twice = values * 2
    array[1] = float("nan")
    seen = values.nan_to_num(3.0)
    array[1] = 8
    has_address = values.data_ptr() == values.untyped_storage().data_ptr() != 0
    return twice, seen, values, float(array.sum()), has_address


def change_arrays_of_parts(batch: Tensor) -> Any:
    """Change the rows of one rank alone, through arrays of tensors that are gone."""
    values = take_copy(batch)
    whole, last = values.numpy(), values[-1].numpy()
    columns = values.t()
    column = columns[0].numpy()
    last[0] = 99
    first = columns * 1
    column[1] = 4
    second = values * 1
    whole[0] = 1
    column[2] = 7
    values.add_(1)
    mask = batch.detach() > 0
    mask.numpy()[1] = True
    return first, second, values, columns, float(column.sum()), mask


def copy_after_changes(batch: Tensor) -> Any:
    values = take_copy(batch)
    row = values[1]
    row.mul_(3)
    copied = copy.deepcopy(values)
    row.zero_()
    return copied, values


def change_sums(batch: Tensor) -> Any:
    total = take_copy(batch).sum(0)
    view, alias = total[None], total
    alias += 1
    total[0] = 4
    view.mul_(2)
    seen = total * 1
    total.detach().zero_()
    return seen, total, view, alias


def keep_gradients_of_changed_rows(batch: Tensor) -> Any:
    values = batch * 2
    row = values[1]
    row.mul_(3)
    with torch.no_grad():
        seen = values.sum()
    return values, seen


def make_adversarial(batch: Tensor) -> Any:
    """Improve a change of the batch, as attacks on models do, from every kind of new leaf."""
    weight = torch.linspace(-1, 1, 5)
    found: list[Any] = []
    for leaf in (
        torch.zeros_like(batch, requires_grad=True),
        torch.randn_like(batch, requires_grad=True),
        torch.empty_like(batch.detach()).fill_(0.1).requires_grad_(),
        batch.detach().new_full((7, 5), 0.2, requires_grad=True),
    ):
        optimizer = torch.optim.Adam([leaf], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            ((batch.detach() / 9 + leaf).tanh() @ weight).square().mean().backward()
            optimizer.step()
        found += [leaf.detach().clone(), leaf.grad, optimizer.state[leaf]["exp_avg"]]
        leaf.data = (leaf + 0.05 * leaf.grad.sign()).clamp(-0.1, 0.1)
        leaf.grad.zero_()
        found += [leaf.detach().clone(), leaf.grad]
    return found


def retain(batch: Tensor) -> Any:
    values = take_copy(batch).requires_grad_() * 2
    values.retain_grad()
    values.square().sum().backward(retain_graph=True)
    first = values.grad.clone()
    values.grad[0] = 1
    values.sum().backward()
    return first, values.grad


def view_gradients(batch: Tensor) -> Any:
    leaf = take_copy(batch).requires_grad_()
    leaf.square().sum().backward()
    row = leaf.grad[0]
    leaf.square().sum().backward()
    summed = leaf.grad * 1
    row.zero_()
    leaf.grad.add_(1)
    return summed, leaf.grad, row


def make_parameters(batch: Tensor) -> Any:
    """Make parameters of the batch: they are plain, and whole on all ranks."""
    rows, means = nn.Parameter(take_copy(batch)), nn.Parameter(batch.detach().mean(0))
    optimizer = torch.optim.SGD([rows, means], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        ((batch.detach() - means) * rows).square().mean().backward()
        optimizer.step()
    state = nn.ParameterList([rows, means]).state_dict()
    return type(rows) is nn.Parameter, list(state.values()), rows.grad, means.grad


def share_memory_with_a_parameter(batch: Tensor) -> Any:
    values = take_copy(batch)
    parameter = nn.Parameter(values)
    (parameter * batch.detach()).sum().backward()
    torch.optim.SGD([parameter], lr=0.5).step()
    return values, parameter.detach()


def assign_slices(batch: Tensor) -> Any:
    values = batch * 1
    values[1:3] = 0
    grown = torch.zeros(9, 5)
    grown[2:] = values
    mixed = torch.zeros_like(batch.detach())
    mask = batch.detach()[:, 0] > -5
    mixed[mask] = values[mask] * 2
    mixed[0] = values[3]
    return values, grown, F.pad(values, (0, 0, 1, 1)), mixed


def merge_columns(batch: Tensor) -> Any:
    columns = batch.t().contiguous()
    return columns.view(-1) * torch.arange(35.0), columns.view(7, 5) * 2, columns.flatten()[3:20]


ALIASES: dict[str, Case] = {
    "set through a view": set_through_a_view,
    "changed data": change_data,
    "rows of views that are gone": change_rows_of_views_that_are_gone,
    "rows and wholes": change_rows_and_wholes,
    "arrays": change_arrays,
    "arrays of parts": change_arrays_of_parts,
    "copy after changes": copy_after_changes,
    "sums": change_sums,
    "gradients of changed rows": keep_gradients_of_changed_rows,
    "adversarial": make_adversarial,
    "retained": retain,
    "views of gradients": view_gradients,
    "parameters of the batch": make_parameters,
    "memory of a parameter": share_memory_with_a_parameter,
    "assigned slices": assign_slices,
    "merged columns": merge_columns,
}
