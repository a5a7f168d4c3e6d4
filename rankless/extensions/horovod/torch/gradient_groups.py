"""Groups of gradients that are reduced together, as the script specifies."""

from collections.abc import Mapping, Sequence

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet
from rankless.extensions.horovod.common.util import split_list
from rankless.extensions.horovod.torch.objects import broadcast_object

Groups = int | Sequence[Sequence[torch.Tensor]]


class GradientGroup:
    """Parameters whose gradients are reduced together once all of them are complete."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.missing = len(self.parameters)
        """The number of gradients that are not complete."""

    def restart(self) -> None:
        """Mark all gradients as incomplete, as after a step."""
        self.missing = len(self.parameters)


def check_groups(groups: Groups | None) -> None:
    """Raise ValueError unless groups are a positive number, or lists that contain each tensor at most once."""
    if groups is None:
        return
    if not isinstance(groups, list):
        if not (isinstance(groups, int) and groups > 0):
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))


def make_groups(
    groups: Groups | None, names: Mapping[torch.Tensor, str], process_set: ProcessSet
) -> dict[torch.Tensor, GradientGroup]:
    """Return the group of each parameter that has one.

    A number is the number of groups, of about equally many parameters each. Parameters in no list are reduced alone.
    The groups are the same on all ranks, although ranks may order their parameters differently.
    """
    if groups is None:
        return {}
    by_name = {name: parameter for parameter, name in names.items()}
    if isinstance(groups, int):
        order = broadcast_object(list(by_name), process_set.ranks[0], "gradient_groups", process_set)
        parts: Sequence[Sequence[torch.Tensor]] = split_list([by_name[name] for name in order], groups)
    else:
        parts = [[parameter for parameter in group if parameter in names] for group in groups]
    gradient_groups = [GradientGroup(part) for part in parts if part]
    return {parameter: group for group in gradient_groups for parameter in group.parameters}
