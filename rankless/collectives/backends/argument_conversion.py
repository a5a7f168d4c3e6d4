"""From the arguments of torch's methods to calls that are ready to run.

Enters: tensors and options as torch passes them. Leaves: a `PreparedCall`, or a `CallError` that says what does not
fit. `process_group` calls the functions.

Note [sparse sums]: the ranks of an all_reduce of sparse tensors have values at different places. They tell each other
what they have, then gather all indices and values, and each adds them up in the order of ranks: all get the same bits.
Gloo does the same, and takes the same: tensors in the layout COO, and only SUM.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.fused_reductions import FusedCall, FusedReductions
from rankless.collectives.backends.group_failure_errors import Membership, make_mismatch_error
from rankless.collectives.backends.reductions import find_reduced_dtype, view_as_reduced
from rankless.collectives.backends.shared_copying_collectives import SharedMovement
from rankless.collectives.backends.shared_reductions import SharedReductions
from rankless.errors import CallError


def require_dense(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `CallError` unless all tensors are dense and in the memory of the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise CallError(
                expected="dense tensors on the CPU, because the group is in shared memory",
                found=f"a tensor with layout {tensor.layout} on {tensor.device}",
                fix="move it to the CPU and make it dense, or use another process group",
            )
        if tensor.is_neg():
            # Some dtypes have no negative. To find that out within the collective would end the group.
            tensor.detach().resolve_neg()


def require_count(tensors: Sequence[object], count: int, what: str) -> None:
    """Raise a `CallError` unless there are `count` of something that belongs to ranks."""
    if len(tensors) != count:
        raise CallError(expected=f"{count} {what}", found=f"{len(tensors)}", fix="pass one for each rank of the group")


def require_values(tensor: torch.Tensor, count: int, what: str) -> None:
    """Raise a `CallError` unless a tensor has `count` values."""
    if tensor.numel() != count:
        raise CallError(
            expected=f"{count} values in {what}",
            found=f"{tensor.numel()}, of shape {tuple(tensor.shape)}",
            fix="pass tensors whose sizes match",
        )


def require_one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raise a `CallError` unless all tensors have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise CallError(
            expected="tensors of one dtype", found=sorted(map(str, dtypes)), fix="convert them to one dtype"
        )


def require_other_rank(rank: int, member: Membership) -> None:
    """Raise a `CallError` unless a rank is another one of the group."""
    if rank == member.rank or not 0 <= rank < member.size:
        raise CallError(
            expected=f"another rank of the group of {member.size} to send to or receive from",
            found=f"rank {rank} of the group, called on rank {member.rank}",
            fix="pass another rank of the group",
        )


def as_list(tensors: Any) -> list[Tensor]:
    """Return the tensors of `[…]`, or of one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def as_only_list(tensors: Any) -> list[Tensor]:
    """Return the tensors of `[[…]]` or `[…]`."""
    values = list(tensors)
    return list(values[0]) if len(values) == 1 and not isinstance(values[0], Tensor) else values


def get_operation(opts: Any) -> Any:
    """Return the reduction of torch's options, or of what stands in their place."""
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)


def get_root(opts: Any) -> int:
    """Return the root's rank in the group from torch's options, or from what stands in their place."""
    return int(getattr(opts, "rootRank", 0 if opts is None else opts))


def get_timeout_seconds(opts: Any, timeout: Any = None) -> float | None:
    """Return how long a call may wait, from its argument or torch's options; None for the group's timeout."""
    given = timeout if timeout is not None else getattr(opts, "timeout", None)
    # Unset options have a negative time.
    return given.total_seconds() if isinstance(given, timedelta) and given.days >= 0 and given else None


def split_bytes(tensor: Tensor, sizes: Sequence[int] | None, size: int) -> list[int]:
    """Return how many bytes of a tensor's rows are for each rank. Raises `CallError` for other split sizes."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row_bytes = tensor.nbytes // max(1, rows)
    splits = list(sizes) if sizes else [rows // size] * size
    require_count(splits, size, "split sizes")
    if sum(splits) != rows or min(splits) < 0:
        raise CallError(
            expected=f"split sizes whose sum is the {rows} rows of the tensor",
            found=splits,
            fix="pass one size for each rank, or none for a tensor whose rows the ranks divide evenly",
        )
    return [rows * row_bytes for rows in splits]


class PreparedCall(NamedTuple):
    """A collective that is ready to run."""

    run: Callable[[], None]
    """Makes the collective, and writes its results."""
    written: Sequence[Tensor]
    """The tensors that it writes."""
    outputs: list[Any]
    """The value of its work, as torch arranges it."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU, and its memory holds its values one after the other."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_neg() and not tensor.is_conj()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a flat contiguous tensor: a view if it is plain, else a copy."""
    tensor = tensor.detach()
    if not is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    # A tensor of one value or none may have any stride.
    return tensor if tensor.stride(0) == 1 else tensor.as_strided((tensor.numel(),), (1,))


def flatten_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat contiguous uint8 tensor: a view if it is plain, else a copy."""
    flat = flatten(tensor)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy the values of `flatten` or `flatten_bytes` to the tensor, if it is not plain."""
    if not is_plain(tensor):
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


@contextmanager
def writable(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Allow changes of tensors that were made in `torch.inference_mode()`."""
    if any(tensor.is_inference() for tensor in tensors) and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            yield
    else:
        yield


def prepare_broadcast(movement: SharedMovement, tensor: Tensor, root: int) -> PreparedCall:
    """Copy the tensor of the root to all ranks. Raises `CallError` for a tensor that is not dense and on the CPU."""
    require_dense([tensor])

    def run() -> None:
        flat = flatten_bytes(tensor)
        movement.broadcast(flat, root)
        write_back(tensor, flat)

    return PreparedCall(run, [tensor], [tensor])


def prepare_all_gather(movement: SharedMovement, calls: Sequence[tuple[Sequence[Tensor], Tensor]]) -> PreparedCall:
    """Copy the tensor of each rank into the list of all ranks, for each pair of a list and a tensor.

    Raises:
        CallError: A tensor is not dense and on the CPU, or lists, dtypes or sizes do not match.
    """
    written = [output for outputs, _ in calls for output in outputs]
    for outputs, value in calls:
        require_count(outputs, movement.size, "outputs")
        require_dense([*outputs, value])
        require_one_dtype([*outputs, value])
        require_values(outputs[movement.rank], value.numel(), "this rank's output of an all_gather")

    def run() -> None:
        for outputs, value in calls:
            flats = [flatten_bytes(output) for output in outputs]
            movement.all_gather(flatten_bytes(value), flats)
            for output, flat in zip(outputs, flats, strict=True):
                write_back(output, flat)

    return PreparedCall(run, written, [list(calls[0][0])] if len(calls) == 1 else written)


def prepare_all_gather_single(
    movement: SharedMovement, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> PreparedCall:
    """Copy the tensors of all ranks, one after the other, into the output; for each output and input.

    Raises:
        CallError: As `prepare_all_gather`.
    """
    require_count(outputs, len(inputs), "outputs")
    require_dense([*outputs, *inputs])
    for output, value in zip(outputs, inputs, strict=True):
        require_one_dtype([output, value])
        require_values(output, movement.size * value.numel(), "the output of an all_gather")

    def run() -> None:
        for output, value in zip(outputs, inputs, strict=True):
            flat, flat_value = flatten_bytes(output), flatten_bytes(value)
            if len(flat):
                movement.all_gather(flat_value, flat.split(len(flat_value)))
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


def prepare_gather(movement: SharedMovement, outputs: list[Tensor], value: Tensor, root: int) -> PreparedCall:
    """Copy the tensor of each rank into the root's list. Others pass no outputs. Raises as `prepare_all_gather`."""
    require_dense([*outputs, value])
    require_one_dtype([*outputs, value])
    if movement.rank == root:
        require_count(outputs, movement.size, "outputs")
        for output in outputs:
            require_values(output, value.numel(), "the outputs of a gather")

    def run() -> None:
        flats = [flatten_bytes(output) for output in outputs]
        movement.gather(flatten_bytes(value), flats or None, root)
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, [outputs])


def prepare_scatter(movement: SharedMovement, output: Tensor, inputs: list[Tensor], root: int) -> PreparedCall:
    """Copy the tensors of the root's list to the ranks. Other ranks pass no inputs. Raises as `prepare_all_gather`."""
    require_dense([*inputs, output])
    require_one_dtype([*inputs, output])
    if movement.rank == root:
        require_count(inputs, movement.size, "inputs")
        for value in inputs:
            require_values(value, output.numel(), "the inputs of a scatter")

    def run() -> None:
        flat, values = flatten_bytes(output), [flatten_bytes(value) for value in inputs]
        movement.scatter(flat, values or None, root)
        write_back(output, flat)

    return PreparedCall(run, [output], [output])


def prepare_all_to_all(movement: SharedMovement, outputs: list[Tensor], inputs: list[Tensor]) -> PreparedCall:
    """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Raises as `prepare_all_gather`."""
    require_count(outputs, movement.size, "outputs")
    require_count(inputs, movement.size, "inputs")
    require_dense([*outputs, *inputs])
    require_one_dtype([*outputs, *inputs])
    require_values(outputs[movement.rank], inputs[movement.rank].numel(), "what a rank sends to itself")

    def run() -> None:
        flats = [flatten_bytes(output) for output in outputs]
        movement.all_to_all(flats, [flatten_bytes(value) for value in inputs])
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, outputs)


def prepare_all_to_all_single(
    movement: SharedMovement,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> PreparedCall:
    """Copy rows of the input to all ranks, and theirs to rows of the output.

    Raises:
        CallError: As `prepare_all_gather`, or the split sizes do not fit the rows.
    """
    require_dense([output, input])
    require_one_dtype([output, input])
    output_bytes = split_bytes(output, output_split_sizes, movement.size)
    input_bytes = split_bytes(input, input_split_sizes, movement.size)

    def run() -> None:
        flat = flatten_bytes(output)
        movement.all_to_all(flat.split(output_bytes), flatten_bytes(input).split(input_bytes))
        write_back(output, flat)

    return PreparedCall(run, [output], [output])


def prepare_barrier(movement: SharedMovement) -> PreparedCall:
    """Wait for all ranks."""
    outputs: list[Any] = []
    return PreparedCall(movement.barrier, [], outputs)


def prepare_all_reduce(reductions: SharedReductions, tensors: Sequence[Tensor], operation: Any) -> PreparedCall:
    """Reduce tensors of one dtype over all ranks, each in place.

    Raises:
        CallError: A tensor is not dense and on the CPU, or the reduction does not take its dtype.
    """
    if len(tensors) == 1 and is_plain(tensors[0]) and not tensors[0].dtype.is_complex:
        (tensor,) = tensors
        reduction = reductions.get_reduction(operation, tensor.dtype)
        return PreparedCall(lambda: reductions.all_reduce(flatten(tensor), reduction), tensors, list(tensors))
    require_dense(tensors)
    require_one_dtype(tensors)
    reduction = reductions.get_reduction(operation, find_reduced_dtype(tensors[0].dtype, operation))

    def run_one() -> None:
        flat = flatten(tensors[0])
        reductions.all_reduce(view_as_reduced(flat), reduction)
        write_back(tensors[0], flat)

    def run_several() -> None:
        flat = torch.cat([flatten(tensor) for tensor in tensors])
        reductions.all_reduce(view_as_reduced(flat), reduction)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return PreparedCall(run_one if len(tensors) == 1 else run_several, tensors, list(tensors))


class FusedTensors(NamedTuple):
    """What `prepare_fused_all_reduce` reduces: the inputs, and the outputs of the same lengths."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def prepare_fused_all_reduce(
    reductions: SharedReductions,
    fused: FusedReductions,
    tensors: FusedTensors,
    operation: Any,
    *,
    before: Callable[[Tensor], object],
    after: Callable[[Tensor], object],
) -> PreparedCall:
    """Reduce tensors over all ranks into others, as if they were one. `before` and `after` are as in `FusedCall`.

    Raises:
        CallError: As `prepare_all_reduce`, or an output has another length than its input.
    """
    inputs, outputs = tensors
    require_count(outputs, len(inputs), "outputs")
    require_dense([*inputs, *outputs])
    require_one_dtype([*inputs, *outputs])
    for value, output in zip(inputs, outputs, strict=True):
        require_values(output, value.numel(), "an output of an all_reduce")
    reduction = reductions.get_reduction(operation, inputs[0].dtype)

    def run() -> None:
        flats = [flatten(output) for output in outputs]
        fused.all_reduce(FusedCall([flatten(value) for value in inputs], flats, reduction, before, after))
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


def prepare_reduce(reductions: SharedReductions, tensor: Tensor, operation: Any, root: int) -> PreparedCall:
    """Reduce a tensor over all ranks, into the root's. Raises as `prepare_all_reduce`."""
    require_dense([tensor])
    reduction = reductions.get_reduction(operation, find_reduced_dtype(tensor.dtype, operation))

    def run() -> None:
        flat = flatten(tensor)
        reductions.reduce(view_as_reduced(flat), reduction, root)
        if reductions.rank == root:
            write_back(tensor, flat)

    return PreparedCall(run, [tensor], [tensor])


def prepare_reduce_scatter(
    reductions: SharedReductions, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], operation: Any
) -> PreparedCall:
    """Make calls of reduce_scatter. The inputs of each are a tensor for each rank, or one for all.

    Raises:
        CallError: As `prepare_all_reduce`, or an output has another length than what is reduced into it.
    """
    size = reductions.size
    require_dense([*outputs, *(value for values in inputs for value in values)])
    calls = []
    for output, values in zip(outputs, inputs, strict=True):
        if len(values) == 1:
            require_values(values[0], size * output.numel(), "the input of a reduce_scatter")
        else:
            require_values(output, values[reductions.rank].numel(), "the output of a reduce_scatter")
        require_one_dtype([output, *values])
        reduction = reductions.get_reduction(operation, find_reduced_dtype(output.dtype, operation))
        calls.append((output, values, reduction))

    def run() -> None:
        for output, parts, reduction in calls:
            flat, values = flatten(output), [flatten(part) for part in parts]
            if len(values) == 1 and size > 1:
                values = list(values[0].split(max(1, len(flat)))) if len(flat) else [flat] * size
            reductions.reduce_scatter(view_as_reduced(flat), list(map(view_as_reduced, values)), reduction)
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


_DESCRIPTION_BYTES = 1024


def prepare_sparse_all_reduce(
    movement: SharedMovement, tensor: Tensor, operation: Any, names: Sequence[int]
) -> PreparedCall:
    """Replace a sparse tensor by the sum over all ranks, which is coalesced.

    Args:
        movement: The collectives of the group.
        tensor: The tensor, in the layout COO and on the CPU.
        operation: A `ReduceOp`, which must be SUM.
        names: The ranks of the group as errors name them.

    Raises:
        CallError: Another reduction, or a tensor that is not on the CPU.
    """
    kind = getattr(operation, "op", operation)
    if kind != dist.ReduceOp.SUM or not tensor.is_cpu:
        raise CallError(
            expected="SUM of a sparse tensor on the CPU",
            found=f"{getattr(kind, 'name', kind)} of one on {tensor.device}",
            fix="choose SUM, or make the tensor dense",
        )

    # Not within the collective, because an error there ends the group: PyTorch cannot add sparse values of all dtypes.
    own = tensor.detach().coalesce()

    def run() -> None:
        counts = _compare(movement, own, names)
        indices, values = own.indices(), own.values()
        index_rows = [indices.new_empty(count, own.sparse_dim()) for count in counts]
        value_rows = [values.new_empty(count, *values.shape[1:]) for count in counts]
        for mine, rows in ((indices.t(), index_rows), (values, value_rows)):
            movement.all_gather(flatten_bytes(mine), [flatten_bytes(row) for row in rows])
        total = torch.sparse_coo_tensor(
            torch.cat(index_rows).t(), torch.cat(value_rows), own.shape, check_invariants=False
        ).coalesce()
        _replace(tensor, total)

    return PreparedCall(run, [tensor], [tensor])


def _replace(tensor: Tensor, total: Tensor) -> None:
    """Give a tensor the values of another one.

    New values of a sparse view do not reach the tensor that it was made of. `torch.distributed.all_reduce` makes such a
    view of complex values.
    """
    base = tensor._base if tensor._is_view() else None
    with torch.no_grad():
        if base is not None and base.dtype.is_complex and not tensor.dtype.is_complex:
            values = torch.view_as_complex(total.values())
            base.copy_(torch.sparse_coo_tensor(total.indices(), values, base.shape, is_coalesced=True))
        tensor.copy_(total)


def _compare(movement: SharedMovement, own: Tensor, names: Sequence[int]) -> list[int]:
    """Return how many values each rank has. Raises `CollectiveError` on all ranks if their tensors do not match."""
    kind = f"all_reduce(SUM, sparse {str(own.dtype).removeprefix('torch.')} of shape {tuple(own.shape)}"
    text = f"{kind}, {own.dense_dim()} dense dims);{own._nnz()}".encode().ljust(_DESCRIPTION_BYTES)
    rows = torch.empty(movement.size, _DESCRIPTION_BYTES, dtype=torch.uint8, device="cpu")
    movement.all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8), list(rows))
    found = [bytes(row.tolist()).decode().rstrip().split(";") for row in rows]
    for rank, (description, _) in enumerate(found):
        if description != found[0][0]:
            raise make_mismatch_error(names[rank], names[0], found=description, own=found[0][0])
    return [int(count) for _, count in found]
