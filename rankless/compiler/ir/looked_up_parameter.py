"""A parameter whose rows are elsewhere, such as on servers, and which a script sees as whole.

Note [looked-up parameters]: the weight of an embedding with sparse gradients stays the object that the script has, as a
divided one does (Note [divided tensors]). Its memory is freed. An embedding looks up the rows that it needs. Any other
function of PyTorch gets the whole value, read at that moment by this worker alone. The whole value lives until the next
call of a job, which takes what the script has changed in it.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor, nn

from rankless.compiler.ir.embedding_functions import (
    EMBEDDING,
    EMBEDDING_BAG,
    bind,
    can_embed,
    can_embed_bags,
    embed,
    embed_bags,
)
from rankless.ownership.partitioned_tensor import CallsWithWholes, call_with_wholes, has_other_users
from rankless.ownership.stored_value import StoredValue, TensorSource
from rankless.ownership.unread_tensor import UnreadTensor


class RowSourceOfTensor(TensorSource, Protocol):
    """Where the rows of a tensor of shape (rows, dim) are."""

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, int64, of shape (n,): a tensor of shape (n, dim) on a CPU."""
        ...


class WatchedValue(StoredValue):
    """A value that is elsewhere, of which the script may have a whole copy and change it."""

    _digest = 0

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source, WeakValueDictionary())

    def gather(self) -> Tensor:
        """Return the whole value, and keep it. Changes of it are found later."""
        if self.whole is None:
            # `.data` is not a view: a view would keep its base, and seem to be used elsewhere for ever.
            self.whole = self.source.read().data
            self._digest = digest(self.whole)
        return self.whole

    def is_changed(self) -> bool:
        """Return whether the script has changed the whole value."""
        return self.whole is not None and digest(self.whole) != self._digest

    def accept(self) -> None:
        """Take the script's changes: the source has them, too."""
        self._digest = 0 if self.whole is None else digest(self.whole)

    def forget(self) -> None:
        """Forget the whole value, unless the script has changed it.

        It is read again, if something shares its memory: that always has the newest.
        """
        if self.is_changed():
            return
        if has_other_users(self.whole):
            assert self.whole is not None
            with torch.no_grad():
                self.whole.copy_(self.source.read())
            self._digest = digest(self.whole)
        else:
            self.whole = None


class LookedUpValue(WatchedValue):
    """The value of a looked-up parameter. It is a `row_lookups.RowReader`."""

    source: RowSourceOfTensor

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, int64, of shape (n,), with the script's changes."""
        return self.source.look_up(ids) if self.whole is None else self.whole.cpu()[ids]


class LookedUpParameter(CallsWithWholes, nn.Parameter):
    """A parameter whose rows are elsewhere; see Note [looked-up parameters]."""

    partition: LookedUpValue

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch: embeddings look up rows, others get the whole value."""
        kwargs = kwargs or {}
        if func not in (F.embedding, F.embedding_bag):
            return call_with_wholes(func, args, kwargs)
        settings = bind(EMBEDDING if func is F.embedding else EMBEDDING_BAG, args, kwargs)
        can_look_up = can_embed if func is F.embedding else can_embed_bags
        is_weight = isinstance(settings["weight"], cls) and not isinstance(settings["input"], cls)
        if not (is_weight and settings["sparse"] and settings["max_norm"] is None and can_look_up(settings)):
            return call_with_wholes(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return (embed if func is F.embedding else embed_bags)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the whole value."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.partition.read(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain parameter with the whole value."""
        return nn.Parameter(self.partition.read(), self.requires_grad).__reduce_ex__(protocol)


def make_looked_up(parameter: nn.Parameter, source: RowSourceOfTensor) -> LookedUpValue:
    """Let a parameter's rows be elsewhere, where they are already. Its memory is freed once nothing else shares it."""
    value = LookedUpValue(source)
    empty = torch.empty_like(parameter, requires_grad=False)
    empty.untyped_storage().resize_(0)
    parameter.data = empty
    parameter.__class__ = LookedUpParameter
    parameter.partition = value  # type: ignore[attr-defined]  # it has another class now
    return value


def take_input(value: Tensor) -> Tensor:
    """Return a value for a program, without autograd history: a looked-up parameter is read when something needs it."""
    if isinstance(value, LookedUpParameter):
        return UnreadTensor(LookedUpValue(value.partition.source))
    return value.detach()


def digest(tensor: Tensor) -> int:
    """Return a checksum of a tensor's elements."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
