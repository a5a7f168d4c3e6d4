"""The whole values of logical tensors that a rank keeps, and changes in place of either.

Note [whole values]: what reads values (`item`, `print`, an index of a row) needs the whole. The first such call gathers
it from all ranks, and the tensor keeps it. Parts and wholes may both be changed in place, and several logical tensors
may share the memory of a part (`x`, `x.data`, `x.view(-1)`). Two rules keep them equal:

- The script may hold views of a whole, as `x[0]`, which are plain tensors, so nobody notices when it changes them.
  Before a part is used, every whole that shares its memory gives it what has changed. PyTorch's version of the whole
  tells of most changes, but not of NumPy's, so a whole with views is compared.
- After a part has changed in place, the viewed wholes that share its memory are gathered again into their own memory,
  and the others are dropped.

A whole that has views lives as long as these do, also without its logical tensor: `x.detach()[0]` changes `x`.
"""

from collections.abc import Iterator
from weakref import ref

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from rankless.collectives.mesh_collectives import all_reduce_maximum
from rankless.logical_view.call_observers import READ, REASONS, MoveReason
from rankless.logical_view.redistribution import move, move_with_gradient
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Placement, Replicate

STALE = -2
"""The version of a part that has changed unnoticed."""


class GatheredWhole:
    """The whole value of a part, and what is known of both.

    Args:
        part: This rank's part.
        axis: The ranks.
        shape: The logical shape.
        placement: How the value lies on the ranks.

    Attributes:
        has_views: Whether the script may have views of the value, in PyTorch or NumPy.
    """

    def __init__(self, part: Tensor, axis: MeshAxis, shape: tuple[int, ...], placement: Placement) -> None:
        self._part, self._axis, self._shape, self._placement = part, axis, shape, placement
        self.has_views = False

    def gather(self, reason: MoveReason) -> Tensor:
        """Gather the value, and return it: this object does not keep it alive. Collective.

        Args:
            reason: Why it is needed, for observers.
        """
        value = self._gather(reason)
        self._value = ref(value)
        self._note_versions(value)
        return value

    def _gather(self, reason: MoveReason) -> Tensor:
        if torch.is_inference_mode_enabled():  # the whole needs a version
            with torch.inference_mode(mode=False), torch.no_grad():
                return self._gather(reason)
        REASONS.append(reason)
        try:
            with temporarily_clear_interpreter_stack():  # of transforms, which do not know collectives
                if self._part.requires_grad and torch.is_grad_enabled():
                    return move_with_gradient(self._part, self._axis, self._shape, self._placement, Replicate())
                return move(self._part.detach(), self._axis, self._shape, self._placement, Replicate()).data
        finally:
            REASONS.pop()

    def _note_versions(self, value: Tensor) -> None:
        self._version, self._version_of_part = value._version, get_version(self._part)

    @property
    def is_stale(self) -> bool:
        """Whether the part has changed since."""
        return get_version(self._part) != self._version_of_part

    def find_changed_part(self) -> Tensor | None:
        """Return the part of the value if the script has changed the value in place; None if it has not.

        Collective if the part itself has changed unnoticed, as autograd adds to a gradient.
        """
        value = self._value()
        if value is None or tuple(value.shape) != self._shape:
            return None
        is_new = value._version != self._version
        if not is_new and self.has_views and self.is_stale:
            self.note_change()
        if not is_new and not (self.has_views and value.device.type == "cpu"):
            return None
        part = self.find_part(value)
        return part if is_new or not is_same(part.detach(), self._part.detach()) else None

    def find_part(self, value: Tensor | None = None) -> Tensor:
        """Return this rank's part of the value."""
        value = self._value() if value is None else value
        assert value is not None, "views keep it"
        with torch.set_grad_enabled(self._needs_gradient(value)):
            return move_with_gradient(value, self._axis, self._shape, Replicate(), self._placement)

    def change_part(self, changed: Tensor, before: Tensor | None) -> None:
        """Change this rank's part in place.

        Args:
            changed: Its new values.
            before: Its old ones, if other changes of the same memory are under way: only what differs is written.
        """
        with torch.set_grad_enabled(self._needs_gradient(changed)):
            self._part.copy_(changed if before is None else torch.where(changed != before, changed, self._part))
        value = self._value()
        if value is not None:
            self._note_versions(value)

    def copy_part(self) -> Tensor:
        """Return a copy of this rank's part."""
        return self._part.detach().clone()

    def _needs_gradient(self, changed: Tensor) -> bool:
        """Return whether a change has gradients. Leaves that need some are changed without, as by an optimizer."""
        return changed.requires_grad and not (self._part.requires_grad and self._part.is_leaf)

    def note_change(self) -> None:
        """Note that the part has changed in place. Collective if the value has views."""
        value = self._value()
        if value is None or not self.has_views:
            self._version_of_part = STALE
            return
        value.copy_(self._gather(READ))
        self._note_versions(value)


class GatheredWholes:
    """The whole values that a rank keeps, by the memory of their parts.

    Args:
        axis: The ranks.
    """

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._by_memory: dict[int, list[ref[GatheredWhole]]] = {}
        self.has_views = False
        """Whether one of them has views."""

    def add(self, whole: GatheredWhole, part: Tensor) -> None:
        """Know a whole value as long as another object keeps it."""
        key = find_memory(part)
        self._by_memory.setdefault(key, []).append(ref(whole, lambda gone: self._remove(key, gone)))

    def _remove(self, key: int, gone: "ref[GatheredWhole]") -> None:
        found = self._by_memory[key]
        found.remove(gone)
        if not found:
            del self._by_memory[key]
        self.has_views = self.has_views and bool(self._by_memory)

    def note_views(self, whole: GatheredWhole, value: Tensor) -> None:
        """Note that the script has views of a value, which keep it."""
        whole.has_views = self.has_views = True
        value.gathered = whole  # type: ignore[attr-defined]

    def take_changes(self, part: Tensor) -> None:
        """Give a part what the script has changed in place of whole values that share its memory.

        Collective if several of them have views: NumPy may have changed the rows of one rank alone.
        """
        wholes = list(self._find(part))
        changes = {whole: whole.find_changed_part() for whole in wholes}
        viewed = [whole for whole in wholes if whole.has_views]
        if len(viewed) > 1:
            flags = torch.tensor(
                [changes[whole] is not None for whole in viewed], dtype=torch.int64, device=part.device
            )
            changed = all_reduce_maximum(flags, among=self._axis).tolist()
            changes |= {
                whole: whole.find_part()
                for whole, is_changed in zip(viewed, changed, strict=True)
                if is_changed and changes[whole] is None
            }
        found = [(whole, new) for whole, new in changes.items() if new is not None]
        before = [whole.copy_part() for whole, _ in found] if len(found) > 1 else [None]
        for (whole, new), old in zip(found, before, strict=False):
            whole.change_part(new, old)
        if found:
            self.note_change(part, besides=found[0][0] if len(found) == 1 else None)

    def note_change(self, part: Tensor, *, besides: GatheredWhole | None = None) -> None:
        """Note that a part has changed in place. Collective if whole values that share its memory have views."""
        for whole in self._find(part):
            if whole is not besides:
                whole.note_change()

    def _find(self, part: Tensor) -> Iterator[GatheredWhole]:
        for reference in list(self._by_memory.get(find_memory(part), ())):
            whole = reference()
            if whole is not None:
                yield whole


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values, also where these are not a number."""
    return torch.equal(one, other) or (
        one.dtype.is_floating_point and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    )


def find_memory(part: Tensor) -> int:
    """Return what names the memory of a part."""
    return int(part.untyped_storage()._cdata)


def get_version(part: Tensor) -> int:
    """Return how often a part was changed in place; always -1 for a tensor of inference mode, which does not count."""
    return -1 if part.is_inference() else part._version
