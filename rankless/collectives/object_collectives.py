"""Collectives of Python objects, with the names and signatures of `torch.distributed`, without pickle by default.

Numbers, text, containers, tensors, NumPy arrays, paths, dates, enums, dataclasses and msgspec structs keep their types
(see `value_encoding`). With `allow_pickle=True` on every rank, whatever pickle takes is sent too. A rank that sends can
then run code on the ranks that receive.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.argument_checks import require_list_on_root, require_one_each
from rankless.collectives.call_signature import Call
from rankless.collectives.checked_process_group import AnyGroup, CheckedGroup, resolve_group
from rankless.collectives.data_movement import all_gather, all_gather_single, broadcast, gather, scatter
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.errors import ConfigError


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Fill `object_list` on every rank with the objects of one rank.

    Args:
        object_list: The objects on the source, and a list of the same length on the others.
        src: The source, as a rank of the job. Default: the group's first rank.
        group: The process group. Default: all ranks of the job.
        device: Ignored; tensors arrive on the CPU. It is there because torch's function has it.
        group_src: The source, as a rank of the group, instead of `src`.
        allow_pickle: Whether to pickle; the same on every rank. Only if all ranks trust one another. Default: False.

    Raises:
        ConfigError: An object has no typed form, an argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises.

    Example:
        >>> objects = [{"epoch": 1}, "name"]
        >>> collectives.broadcast_object_list(objects, src=0)
        >>> objects
        [{'epoch': 1}, 'name']
    """
    del device
    if (checked := resolve_group(group)) is None:
        return
    with checked.report_refusals("broadcast_object_list"):
        source = checked.resolve_rank(src, group_src, "src")
        data = encode_object(object_list, allow_pickle) if checked.rank == source else b""
    _check_call(checked, "broadcast_object_list", f"{len(object_list)} objects, from rank {source}", allow_pickle)
    size = _number(len(data), checked)
    broadcast(size, group=checked.torch, group_src=source)
    payload = _tensor(data, checked) if checked.rank == source else _empty_bytes(int(size.item()), checked)
    broadcast(payload, group=checked.torch, group_src=source)
    if checked.rank != source:
        object_list[:] = decode_object(payload, allow_pickle)


def all_gather_object(object_list: list[Any], obj: Any, group: AnyGroup = None, *, allow_pickle: bool = False) -> None:
    """Fill `object_list[i]` on every rank with rank i's object.

    Args:
        object_list: A list with one element for each rank of the group.
        obj: This rank's object.
        group: The process group. Default: all ranks of the job.
        allow_pickle: Whether to pickle; the same on every rank. Only if all ranks trust one another. Default: False.

    Raises:
        ConfigError: An object has no typed form, an argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises.

    Example:
        >>> objects = [None]
        >>> collectives.all_gather_object(objects, {"loss": 0.5})
        >>> objects
        [{'loss': 0.5}]
    """
    if (checked := resolve_group(group)) is None:
        return
    with checked.report_refusals("all_gather_object"):
        require_one_each(object_list, checked, "object_list")
        own_data = _tensor(encode_object(obj, allow_pickle), checked)
    _check_call(checked, "all_gather_object", "", allow_pickle)
    pieces = [_empty_bytes(size, checked) for size in _gather_sizes(own_data, checked)]
    all_gather(pieces, own_data, group=checked.torch)
    object_list[:] = [decode_object(piece, allow_pickle) for piece in pieces]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    group_dst: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Fill `object_gather_list[i]` on one rank with rank i's object.

    Args:
        obj: This rank's object.
        object_gather_list: On the destination a list with one element for each rank of the group; None on the others.
        dst: The destination, as a rank of the job. Default: the group's first rank.
        group: The process group. Default: all ranks of the job.
        group_dst: The destination, as a rank of the group, instead of `dst`.
        allow_pickle: Whether to pickle; the same on every rank. Only if all ranks trust one another. Default: False.

    Raises:
        ConfigError: An object has no typed form, an argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises.

    Example:
        >>> objects = [None]
        >>> collectives.gather_object("done", objects, dst=0)
        >>> objects
        ['done']
    """
    if (checked := resolve_group(group)) is None:
        return
    with checked.report_refusals("gather_object"):
        root = checked.resolve_rank(dst, group_dst, "dst")
        require_list_on_root(object_gather_list, root, checked, "object_gather_list", "dst")
        if object_gather_list is not None:
            require_one_each(object_gather_list, checked, "object_gather_list")
        own_data = _tensor(encode_object(obj, allow_pickle), checked)
    _check_call(checked, "gather_object", f"to rank {root}", allow_pickle)
    sizes = _gather_sizes(own_data, checked)
    pieces = None if object_gather_list is None else [_empty_bytes(size, checked) for size in sizes]
    gather(own_data, pieces, group=checked.torch, group_dst=root)
    if pieces is not None and object_gather_list is not None:
        object_gather_list[:] = [decode_object(piece, allow_pickle) for piece in pieces]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Put the i-th object of one rank's input list into the first element of rank i's output list.

    Args:
        scatter_object_output_list: A list with at least one element.
        scatter_object_input_list: On the source one object for each rank of the group; None on the others.
        src: The source, as a rank of the job. Default: the group's first rank.
        group: The process group. Default: all ranks of the job.
        group_src: The source, as a rank of the group, instead of `src`.
        allow_pickle: Whether to pickle; the same on every rank. Only if all ranks trust one another. Default: False.

    Raises:
        ConfigError: An object has no typed form, an argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises.

    Example:
        >>> output = [None]
        >>> collectives.scatter_object_list(output, ["shard 0"], src=0)
        >>> output
        ['shard 0']
    """
    if (checked := resolve_group(group)) is None:
        return
    with checked.report_refusals("scatter_object_list"):
        source = checked.resolve_rank(src, group_src, "src")
        require_list_on_root(scatter_object_input_list, source, checked, "scatter_object_input_list", "src")
        if not scatter_object_output_list:
            raise ConfigError(
                expected="an output list with at least one element",
                found="an empty list",
                fix="pass [None], and read its first element afterwards",
            )
        pieces = None
        if scatter_object_input_list is not None:
            require_one_each(scatter_object_input_list, checked, "scatter_object_input_list")
            pieces = [_tensor(encode_object(item, allow_pickle), checked) for item in scatter_object_input_list]
    _check_call(checked, "scatter_object_list", f"from rank {source}", allow_pickle)
    sizes = _number(0, checked).repeat(checked.size)
    if pieces is not None:
        sizes.copy_(torch.tensor([piece.numel() for piece in pieces], device="cpu"))
    broadcast(sizes, group=checked.torch, group_src=source)
    own_data = _empty_bytes(int(sizes[checked.rank].item()), checked)
    scatter(own_data, pieces, group=checked.torch, group_src=source)
    scatter_object_output_list[0] = decode_object(own_data, allow_pickle)


def encode_object(value: Any, allow_pickle: bool) -> bytes:
    """Return an object as bytes. Raises `ConfigError` for an object without a typed form, unless pickle is allowed."""
    if allow_pickle:
        return pickle.dumps(value)
    try:
        return encode_value(value)
    except TypeError as error:
        raise ConfigError(
            expected="numbers, text, containers, tensors, arrays or dataclasses",
            found=str(error),
            fix="send plain data, or pass allow_pickle=True on every rank if all ranks trust one another",
        ) from error


def decode_object(data: Tensor, allow_pickle: bool) -> Any:
    """Return the object of bytes that `encode_object` made."""
    read: Callable[[bytes], Any] = pickle.loads if allow_pickle else decode_value
    return read(data.cpu().numpy().tobytes())


def _check_call(checked: CheckedGroup, operation: str, settings: str, allow_pickle: bool) -> None:
    """Compare the ranks' calls under the name that the script uses, before the collectives that implement it."""
    received = [text for text in (settings, "allow_pickle=True" * allow_pickle) if text]
    checked.queue.run(Call(operation=operation, settings=", ".join(received)), lambda _async_op: None)


def _gather_sizes(own_data: Tensor, checked: CheckedGroup) -> list[int]:
    sizes = _number(0, checked).repeat(checked.size)
    all_gather_single(sizes, _number(own_data.numel(), checked), group=checked.torch)
    return [int(size) for size in sizes.tolist()]


def _number(value: int, checked: CheckedGroup) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=_device(checked))


def _empty_bytes(size: int, checked: CheckedGroup) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=_device(checked))


def _tensor(data: bytes, checked: CheckedGroup) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device(checked))


def _device(checked: CheckedGroup) -> torch.device:
    """Return the device from which the group's backend takes tensors."""
    if dist.get_backend(checked.torch) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
