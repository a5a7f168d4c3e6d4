"""Tensors of which each worker holds one shard, and which a script sees as whole.

Note [divided tensors]: a parameter that is divided between workers stays the object that the script, its modules and
its optimizers have. Its memory is freed. Functions that need only its shape, dtype or gradient find these. Any other
function of PyTorch gets the whole tensor, gathered from all workers, so it computes what it would on one device. All
workers run the same script, so all gather. The whole tensor lives until the next call of a job, which takes the shards
back, with the script's changes. If the script keeps a tensor that shares its memory, such as `weight.data`, it lives on
and is updated after each step. A shard may be a divided tensor itself, if several axes divide a tensor.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.collectives.mesh_collectives import all_reduce_maximum
from rankless.errors import ConfigError, RanklessError
from rankless.ownership.host_device_copies import copy_to_device
from rankless.ownership.shard_layout import ShardLayout, gather_shards
from rankless.ownership.stored_value import StoredValue
from rankless.parallel.mesh import WorkerGroup

Result = TypeVar("Result")


class RunTogether(Protocol):
    """Makes what workers compute together outside of jobs, again if one of them is lost."""

    def __call__(self, attempt: Callable[[], Result], *, is_in_step: bool = False) -> Result:
        """Return what `attempt` returns, which changes nothing that lasts.

        Args:
            attempt: Computes it.
            is_in_step: Whether it is a part of a step, whose gradients all workers have.
        """
        ...


def run_directly(attempt: Callable[[], Result], *, is_in_step: bool = False) -> Result:  # noqa: ARG001
    """Return what workers compute together, where none may be lost."""
    return attempt()


class WholeValues:
    """The whole values of divided tensors that the script uses outside jobs.

    Args:
        group: The workers that hold the shards.
        require_all: Called with what is about to be gathered. Raises if not all workers will take part.
        run: Makes what workers compute together outside of jobs, again if one of them is lost. Default: it does not.
        copy_holders: For each worker the one with copies of its shards; none without. See Note [copies of shards].
        within: Gathers the shards themselves, which are divided along an inner axis, too.
    """

    def __init__(
        self,
        group: WorkerGroup,
        require_all: Callable[[str], None],
        run: RunTogether = run_directly,
        copy_holders: Sequence[int] = (),
        within: "WholeValues | None" = None,
    ) -> None:
        self.group, self.copy_holders, self._within = group, copy_holders, within
        self.copied_workers = [worker for worker, holder in enumerate(copy_holders) if holder == group.rank]
        """Those of whose shards this worker has copies."""
        self._require_all, self._run = require_all, run
        self._process_id = os.getpid()
        self._open: list[Partition] = []
        self.are_shards_newer = False
        """Whether shards have changed since whole values were updated."""
        self._is_over = False
        """Whether all values have been made whole, after a worker was lost."""

    def gather(self, partition: "Partition") -> Tensor:
        """Return the whole value of a divided tensor. Collective, unless it is there already."""
        self.gather_all([partition])
        assert partition.whole is not None, f"{partition.name} was made whole"
        return partition.whole

    def gather_all(self, partitions: Iterable["Partition"]) -> None:
        """Gather the whole values of divided tensors together. Collective, unless they are there already."""
        missing = [each for each in dict.fromkeys(partitions) if each.whole is None]
        if not missing:
            return
        if os.getpid() != self._process_id:
            raise RanklessError(
                expected=f"{missing[0].name}, which is divided between workers, to be read by the workers",
                found="a child process, as of a DataLoader, which the other workers do not wait for",
                fix="pass it a copy that the worker has made: copy.deepcopy(model)",
            )
        wholes = self._run(lambda: self._gather_for_script(missing))
        if not self._is_over:
            for partition, whole in zip(missing, wholes, strict=True):
                partition.whole = whole
                self._open.append(partition)

    def _gather_for_script(self, partitions: Sequence["Partition"]) -> Sequence[Tensor]:
        if self._is_over:
            return ()
        self._require_all(f"a read of {partitions[0].name} outside a job")
        return self.gather_now(partitions)

    def gather_now(self, partitions: Sequence["Partition"]) -> list[Tensor]:
        """Return the whole values as their shards are now. Collective."""
        shards = []
        for partition in partitions:
            within = find_partition(partition.shard)
            own = partition.shard.detach() if within is None else within.gather_once()
            shards.append(copy_to_device(own, partition.device))
        wholes = gather_shards([partition.layout for partition in partitions], shards, among=self.group)
        # `.data` is not a view: a view would keep its base, and seem to be used elsewhere for ever.
        return [whole.data for whole in wholes]

    def keep(self, partition: "Partition", whole: Tensor) -> None:
        """Begin with a whole value that is there already."""
        partition.whole = whole
        self._open.append(partition)

    def find_open(self, partitions: Iterable["Partition"]) -> bool:
        """Begin with the whole values of tensors that were divided before. All workers have them in the same order.

        Returns:
            Whether there are any.
        """
        known = {id(partition) for partition in self._open}
        found = [each for each in partitions if each.whole is not None and id(each) not in known]
        self._open += found
        return bool(found)

    @property
    def is_open(self) -> bool:
        """Whether there are any, on all workers."""
        return bool(self._open)

    def write_back(self) -> None:
        """Take the shards of the whole values, which the script may have changed, and forget those that it dropped.

        Collective if there are any.
        """
        if not self._open:
            return
        with torch.no_grad():
            for partition in self._open:
                assert partition.whole is not None
                partition.set_shards(partition.whole)
        self.drop_unused()

    def drop_unused(self) -> None:
        """Forget the whole values that the script holds on no worker. Collective if there are any."""
        if not self._open:
            return
        # Workers may free memory at different times. They must agree on what they will gather, also with those along
        # inner axes, who gather the shards of a value before.
        used = torch.tensor(
            [has_other_users(partition.whole) for partition in self._open], dtype=torch.uint8, device="cpu"
        ).to(self._open[0].device)
        values: WholeValues | None = self
        while values is not None:
            used, values = all_reduce_maximum(used, among=values.group), values._within
        for partition, keeps in zip(self._open, used.tolist(), strict=True):
            if not keeps:
                partition.whole = None
        self._open = [partition for partition in self._open if partition.whole is not None]

    def end(self) -> None:
        """Forget all values, which have been made whole after a worker was lost."""
        self._open, self._is_over, self.are_shards_newer = [], True, False

    def refresh(self) -> None:
        """Update the whole values that the script still holds from their shards. Collective if there are any."""
        if self._open:
            self._run(self._refresh_all)
        self.are_shards_newer = False

    def _refresh_all(self) -> None:
        with torch.no_grad():
            for partition in self._open:  # one after the other, for there may be many
                assert partition.whole is not None
                partition.whole.copy_(self.gather_now([partition])[0])


class Partition:
    """How a tensor is divided, and this worker's shard of it.

    Attributes:
        layout: How the tensor is divided.
        shard: This worker's shard.
        name: What errors call the tensor.
        device: Where the whole value lies. The shard may lie on the host.
        copies: The shards of other workers of which this one has copies, by worker; see Note [copies of shards].
        whole: The whole value, while the script uses it.
        values: Gathers it.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shard: Tensor,
        name: str,
        values: WholeValues,
        *,
        device: torch.device,
        copies: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.shard = shard
        self.copies = dict(copies or {})
        self.name = name
        self.device = device
        self.whole: Tensor | None = None
        self.values = values

    @property
    def group(self) -> WorkerGroup:
        """The workers that hold its shards."""
        return self.values.group

    def gather(self) -> Tensor:
        """Return the whole value, without autograd history. Collective, unless it is there already."""
        return self.values.gather(self)

    def gather_once(self) -> Tensor:
        """Return the whole value, and keep it only if it is there already. Collective, unless it is."""
        return self.values.gather_now([self])[0] if self.whole is None else self.whole

    def take(self, value: StoredValue) -> None:
        """Take a new value, of which only this worker's rows are read, unless the script holds a whole one."""
        own = value.select(self.layout.placement.dim, self.own_ranges)
        within = find_partition(self.shard)
        if within is not None:
            within.take(own)
        with torch.no_grad():
            if within is None:
                self.shard.copy_(own.read())
            for worker, copy in self.copies.items():
                copy.copy_(value.select(self.layout.placement.dim, self.layout.list_ranges(worker)).read())
            if self.whole is not None:
                self.whole.copy_(value.read())

    @property
    def is_copy(self) -> bool:
        """Whether this worker's shard is a copy of another one's; see Note [copies of shards]."""
        return self.values.group.rank in self.layout.copies

    @property
    def own_ranges(self) -> list[tuple[int, int]]:
        """The rows of the whole tensor that this worker's shard has, as ranges from a row up to another."""
        return self.layout.list_ranges(self.values.group.rank)

    def get_current_shard(self) -> Tensor:
        """Return what this worker holds, with what the script has changed in the whole value."""
        within = find_partition(self.shard)
        if self.whole is None:
            return self.shard.detach() if within is None else within.get_current_shard()
        own = self.layout.get_shard(self.whole, self.values.group.rank)
        return own if within is None else within.get_shard(own)

    def set_shards(self, whole: Tensor) -> None:
        """Give this worker's shard, and its copies of others, the value that they have in a whole one."""
        copy_whole(self.shard, self.layout.get_shard(whole, self.values.group.rank))
        for worker, copy in self.copies.items():
            copy.copy_(self.layout.get_shard(whole, worker))

    def get_shard(self, whole: Tensor) -> Tensor:
        """Return of a whole value what this worker holds."""
        own = self.layout.get_shard(whole, self.values.group.rank)
        within = find_partition(self.shard)
        return own if within is None else within.get_shard(own)


class CallsWithWholes:
    """A tensor whose functions get whole values; see Note [divided tensors]."""

    partition: Any
    """Has the whole value: its method `gather` returns it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch with whole values."""
        return call_with_wholes(func, args, kwargs or {})


class PartitionedTensor(CallsWithWholes, Tensor):
    """A tensor of which each worker holds one shard."""

    partition: Partition


class PartitionedParameter(CallsWithWholes, nn.Parameter):
    """A parameter of which each worker holds one shard."""

    partition: Partition

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the whole value."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.partition.gather().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain parameter with the whole value."""
        return nn.Parameter(self.partition.gather().clone(), self.requires_grad).__reduce_ex__(protocol)


Partitioned = (PartitionedParameter, PartitionedTensor)


class ReadParameter(torch.autograd.Function):
    """Read the whole value of a divided parameter, whose gradient is then the parameter's."""

    @staticmethod
    def forward(_context: Any, _parameter: Tensor, whole: Tensor) -> Tensor:
        """Return the whole value."""
        return whole.view_as(whole)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Any:
        """Return the gradient of the parameter."""
        return gradient, None


def call_with_wholes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of PyTorch; divided tensors among its arguments are whole, if it needs more than their shapes."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in WITHOUT_ELEMENTS:
            return func(*args, **kwargs)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].partition.gather().detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            replace_value(args[0], get_whole(args[1], {}))
            return None
        if func == Tensor.copy_ and len(args) > 1 and isinstance(getattr(args[1], "partition", None), StoredValue):
            return copy_stored(args[0], args[1].partition)
        gather_together(args)
        originals: dict[int, Tensor] = {}
        replaced = pytree.tree_map(lambda item: get_whole(item, originals), (tuple(args), dict(kwargs)))
    result = func(*replaced[0], **replaced[1])  # other arguments may be tensors with functions of their own
    # An in-place function returns the tensor that it has changed.
    return pytree.tree_map(lambda item: originals.get(id(item), item), result)


def gather_together(args: Sequence[Any]) -> None:
    """Gather the divided tensors in lists among the arguments of a function, as of a norm of all gradients."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    found: dict[WholeValues, list[Partition]] = {}
    for item in pytree.tree_leaves(lists) if lists else ():
        if isinstance(item, Partitioned):
            found.setdefault(item.partition.values, []).append(item.partition)
    for values, partitions in found.items():
        values.gather_all(partitions)


def copy_stored(target: Tensor, value: StoredValue) -> Tensor:
    """Copy a stored value to a tensor, which may be divided, and keep nothing of it."""
    partition = find_partition(target)
    if partition is not None and partition.layout.shape == value.shape:
        partition.take(value)
        return target
    plain = target.partition.gather() if isinstance(target, CallsWithWholes) else target
    plain.copy_(value.read())
    return target


def get_whole(item: Any, originals: dict[int, Tensor]) -> Any:
    """Return the whole value in place of a divided tensor; anything else as it is."""
    if not isinstance(item, CallsWithWholes):
        return item
    whole = item.partition.gather()
    assert isinstance(item, Tensor)
    if torch.is_grad_enabled() and item.requires_grad:
        whole = ReadParameter.apply(item, whole)  # type: ignore[no-untyped-call]
    originals[id(whole)] = item
    return whole


def replace_value(tensor: Any, value: Tensor) -> None:
    """Give a divided tensor a new value, as `tensor.data = value` does."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype or value.device != tensor.device:
        if isinstance(tensor, PartitionedTensor):  # the next step divides what belongs to a parameter anew
            tensor.__class__ = Tensor  # type: ignore[assignment]
            del tensor.partition
            tensor.data = value
            return
        raise ConfigError(
            expected=f"a value of the same shape, dtype and device for {tensor.partition.name}, which is divided "
            "between workers",
            found=f"{value.dtype} {list(value.shape)} on {value.device} for {tensor.dtype} {list(tensor.shape)}",
            fix="convert or move the model before the first call of its job",
        )
    with torch.no_grad():
        tensor.partition.gather().copy_(value)


def has_other_users(tensor: Tensor | None) -> bool:
    """Return whether another tensor shares a tensor's memory."""
    if tensor is None:
        return False
    storage = tensor.untyped_storage()  # one more use, besides the tensor's own
    return torch._C._storage_Use_Count(storage._cdata) > 2


def make_partitioned_tensor(partition: Partition, before: Any = None) -> PartitionedTensor:
    """Return a tensor without memory of its own for a partition.

    Args:
        partition: The partition.
        before: What the script had until now. A tensor that was divided before stays the object that it is, and its
            whole value stays where it is.
    """
    if getattr(before, "was_divided", False):
        del before.was_divided
        partition.whole = before.data
        before.data = make_without_memory(partition)
        before.__class__ = PartitionedTensor
        before.partition = partition
        return cast("PartitionedTensor", before)
    with torch._C.DisableTorchFunctionSubclass():
        made = make_without_memory(partition).as_subclass(PartitionedTensor)
    made.partition = partition
    return made


def divide_parameter(parameter: nn.Parameter, partition: Partition) -> None:
    """Make a parameter a divided one. Its memory is freed once nothing else shares it."""
    parameter.data = make_without_memory(partition)
    parameter.__class__ = PartitionedParameter
    parameter.partition = partition  # type: ignore[attr-defined]  # it has another class now


@contextlib.contextmanager
def as_plain_parameters(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within the context, divided parameters among these are plain ones without elements, for a trace on shapes."""
    kinds = [(item, type(item)) for item in parameters if isinstance(item, CallsWithWholes)]
    divided = [(item, kind) for item, kind in kinds if issubclass(kind, nn.Parameter)]
    for item, _ in divided:
        item.__class__ = nn.Parameter  # type: ignore[assignment]  # it has no attributes of its own
    try:
        yield
    finally:
        for item, kind in divided:
            item.__class__ = kind


def make_without_memory(partition: Partition) -> Tensor:
    """Return a plain tensor with the shape of the whole, and no elements in memory."""
    layout, shard = partition.layout, get_local(partition.shard)
    made = shard.detach().new_empty_strided(layout.shape, layout.strides, device=partition.device)
    made.untyped_storage().resize_(0)
    return made


def find_partition(tensor: Tensor) -> Partition | None:
    """Return how a tensor is divided; None for a plain one."""
    return tensor.partition if isinstance(tensor, Partitioned) else None


def list_partitions(tensor: Tensor) -> list[Partition]:
    """Return how a tensor is divided, how its shard is divided, and so on; nothing for a plain one."""
    found = []
    known = find_partition(tensor)
    while known is not None:
        found.append(known)
        known = find_partition(known.shard)
    return found


def get_local(tensor: Tensor) -> Tensor:
    """Return what this worker holds of a tensor: all of it, or its shard."""
    partitions = list_partitions(tensor)
    return partitions[-1].shard if partitions else tensor


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Copy a whole value to a tensor, which may be divided, without a gather."""
    known = find_partition(target)
    if known is None:
        target.copy_(value)
        return
    known.set_shards(value)
    if known.whole is not None:
        known.whole.copy_(value)


def list_functions_without_elements() -> frozenset[Any]:
    """Return the functions of PyTorch that need a tensor's shape, dtype, gradient or the like, but not its elements."""
    properties = (
        "shape dtype device layout ndim itemsize requires_grad grad grad_fn is_leaf output_nr _version name names "
        "is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested is_xpu is_mps is_vulkan is_mtia is_maia "
        "is_ipu is_xla is_sparse_csr retains_grad _backward_hooks _post_accumulate_grad_hooks _grad_fn nbytes volatile"
    )
    methods = (
        "size stride dim numel nelement element_size ndimension storage_offset is_floating_point is_complex is_signed "
        "is_contiguous is_inference is_conj is_neg is_same_size get_device has_names requires_grad_ register_hook "
        "register_post_accumulate_grad_hook retain_grad __len__ __hash__ _is_view _is_zerotensor sym_size dim_order "
        "is_pinned is_shared"
    )
    found: set[Any] = set()
    for name in properties.split():
        attribute = getattr(Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if hasattr(attribute, accessor):
                found.add(getattr(attribute, accessor))
    found.update(getattr(Tensor, name) for name in methods.split() if hasattr(Tensor, name))
    found.update((torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor))
    return frozenset(found)


WITHOUT_ELEMENTS = list_functions_without_elements()
