"""Functions for data-parallel scripts: broadcast a model and an optimizer from one rank, and compare the ranks."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rankless.collectives.checked_process_group import AnyGroup, resolve_group
from rankless.collectives.data_movement import broadcast
from rankless.collectives.mesh_collectives import flatten_by_kind
from rankless.collectives.object_collectives import all_gather_object, broadcast_object_list
from rankless.collectives.value_encoding import encode_value
from rankless.errors import ConfigError, RanksDiverged

Parameters = nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]

MAX_NAMES_SHOWN = 5


def broadcast_parameters(parameters: Parameters, root_rank: int = 0, group: AnyGroup = None) -> None:
    """Overwrite the tensors of a model on every rank with those of one rank.

    Args:
        parameters: A module, its `state_dict()`, or its `named_parameters()`.
        root_rank: The source, as a rank of the job. Default: 0.
        group: The process group. Default: all ranks of the job.

    Raises:
        RanksDiverged: Names, shapes or dtypes differ between ranks. Every rank raises, before anything is overwritten.
        ConfigError: `parameters` has no names, or the process has not joined a job.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> collectives.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if resolve_group(group) is None:
        return
    named = named_tensors(parameters)
    described = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()}
    _require_equal(described, group, "the same names, shapes and dtypes of parameters on every rank")
    for flat, copy_back in flatten_by_kind(named.values()):
        if flat.numel():
            broadcast(flat, root_rank, group)
            copy_back()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, group: AnyGroup = None) -> None:
    """Give the optimizer on every rank the state and the settings of the optimizer on one rank.

    The optimizers of the other ranks may have no state yet.

    Args:
        optimizer: This rank's optimizer, over the same parameters.
        root_rank: The source, as a rank of the job. Default: 0.
        group: The process group. Default: all ranks of the job.

    Raises:
        ConfigError: The state holds an object without a typed form, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        >>> collectives.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    checked = resolve_group(group)
    if checked is None:
        return
    received: list[Any] = [
        optimizer.state_dict() if checked.rank == checked.resolve_rank(root_rank, None, "root_rank") else None
    ]
    broadcast_object_list(received, root_rank, group)
    if checked.rank != checked.resolve_rank(root_rank, None, "root_rank"):
        optimizer.load_state_dict(received[0])


def require_synchronized(model: Parameters, optimizer: Optimizer | None, group: AnyGroup = None) -> None:
    """Raise `RanksDiverged` on every rank, naming tensors and ranks, unless all ranks have the same bits."""
    found = {name: digest(tensor) for name, tensor in named_tensors(model).items()}
    if optimizer is not None:
        leaves, _ = pytree.tree_flatten_with_path(optimizer.state_dict())
        found |= {f"optimizer{pytree.keystr(path)}": digest(leaf) for path, leaf in leaves}
    _require_equal(found, group, "the same parameters, buffers and optimizer state on every rank")


def named_tensors(parameters: Parameters) -> dict[str, Tensor]:
    """Return the tensors by name. Raises `ConfigError` for an argument without names."""
    items: Any = parameters
    if isinstance(parameters, nn.Module):
        items = parameters.state_dict(keep_vars=True)
    if isinstance(items, Mapping):
        items = items.items()
    try:
        named = dict(items)
    except (TypeError, ValueError):
        raise ConfigError(
            expected="a module, its state_dict() or its named_parameters()",
            found=type(parameters).__name__,
            fix="pass model.state_dict()",
        ) from None
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal values."""
    return blake2b(encode_value(value.detach() if isinstance(value, Tensor) else value), digest_size=16).digest()


def _require_equal(own_entries: Mapping[str, Any], group: AnyGroup, expected: str) -> None:
    checked = resolve_group(group)
    if checked is None or checked.size == 1:
        return
    received: list[Any] = [None] * checked.size
    all_gather_object(received, dict(own_entries), group)
    names = list(dict.fromkeys(name for one in received for name in one))
    differing = {
        name: [rank for rank, one in enumerate(received) if one.get(name) != received[0].get(name)] for name in names
    }
    wrong = [
        f"{name} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for name, ranks in differing.items()
        if ranks
    ]
    if wrong:
        more = f" and {len(wrong) - MAX_NAMES_SHOWN} more" if len(wrong) > MAX_NAMES_SHOWN else ""
        raise RanksDiverged(
            expected=expected,
            found=f"different from rank 0: {', '.join(wrong[:MAX_NAMES_SHOWN])}{more}",
            fix="call broadcast_parameters and broadcast_optimizer_state first; then look for what one rank does alone",
        )
