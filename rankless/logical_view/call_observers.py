"""What observers hear of a script in the logical view: calls of PyTorch's functions, transfers, and batches.

An observer that stands in `OBSERVERS` before a view is made hears all that the view runs, in order. It must stand there
on all ranks, because the plans of an observed view are for the sizes of each call alone; see `ObservedPlans`. Without
observers nothing is computed for them.
"""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from rankless.compiler.ir.operator_origin import ModuleName, OperatorOrigin
from rankless.compiler.sharding.redistribute import CollectivePurpose, CollectiveRecord, Redistribution
from rankless.user_code import is_user_code, user_line

CallKind = Literal["divided", "sum", "whole", "plain"]
"""Whether a rank computes its rows, whole sums over the rows, whole rows, or with plain tensors alone."""


class MoveReason(NamedTuple):
    """Why a value moves between ranks."""

    purpose: CollectivePurpose
    text: str
    function: Any = None
    """The function that needs it, which `text` announces."""


READ = MoveReason("output", "a read of its values")
REASONS: list[MoveReason] = []
"""Why the present value moves. Without any it is a gradient."""
CALL_MODULE = nn.Module._call_impl.__code__
NAMES = WeakIdKeyDictionary()
"""For the outermost modules that were called: the paths of their modules by `id`."""


class CallObserver:
    """Hears what a script does in the logical view. An observer has the methods of the events that it wants to hear."""

    def hear_call(
        self, function: str, kind: CallKind, reason: str, origin: OperatorOrigin, *, has_gradient: bool
    ) -> None:
        """Hear that a function is called, why it does not run on parts, and whether its result may need a gradient.

        With plain tensors alone it is heard of if its result does.
        """

    def hear_move(self, move: CollectiveRecord) -> None:
        """Hear that a transfer between the ranks begins."""

    def hear_batch(self, source: str, batch: Any, *, is_shared: bool) -> None:
        """Hear of a batch that the script gets, and whether each rank has read its own rows alone."""


OBSERVERS: list[CallObserver] = []


def send_call(function: Any, kind: CallKind, reason: str = "", *, has_gradient: bool = True) -> None:
    """Tell the observers of a call; see `hear_call`."""
    if OBSERVERS:
        name, origin = name_function(function), find_origin()
        for observer in OBSERVERS:
            observer.hear_call(name, kind, reason, origin, has_gradient=has_gradient)


def send_records(moves: Sequence[CollectiveRecord], origin: OperatorOrigin) -> None:
    """Tell the observers of transfers that a line of the script has caused."""
    for move in moves:
        for observer in OBSERVERS:
            observer.hear_move(replace(move, line=origin.line, module=origin.module))


def send_move(value: Tensor, target: Redistribution, shape: Sequence[int], leaves: Sequence[Tensor] = ()) -> None:
    """Tell the observers of a transfer.

    Args:
        value: This rank's part of what moves.
        target: The redistribution.
        shape: The logical shape.
        leaves: The leaves whose gradients it holds, if it is a bucket.
    """
    size = torch.Size(shape).numel() * value.element_size()
    count = f"{len(leaves)} gradients" if len(leaves) > 1 else "a gradient"
    reason = REASONS[-1] if REASONS else MoveReason("gradient", count)
    is_backward = torch._C._current_graph_task_id() != -1
    move = CollectiveRecord(
        kind=target.kind,
        purpose=reason.purpose,
        value=", ".join(map(name_leaf, leaves)) or format_tensor(value, shape),
        bytes=size,
        sent_bytes=target.sent_bytes(size),
        line="",
        reason=reason.text if reason.function is None else f"{reason.text} {name_function(reason.function)}",
        axis=target.axis.name,
        backward=is_backward,
        gathered=target.is_gather and reason.purpose != "gradient",
        in_full=target.is_gather and reason.purpose == "input",
        overlapped=is_backward and len(leaves) > 0,
    )
    send_records([move], find_origin())


def name_function(function: Any) -> str:
    """Return the name of a function of PyTorch, as "torch.nn.functional.relu"."""
    known = resolve_name(function) if isinstance(function, Hashable) else None
    return str(known or getattr(function, "__name__", function))


def name_leaf(leaf: Tensor) -> str:
    """Return the path of a parameter; dtype and shape of a tensor that belongs to no module that was called."""
    parameters = ((model, path, item) for model in NAMES for path, item in model.named_parameters())
    found = (f"{NAMES[model][id(model)]}.{path}" for model, path, item in parameters if item is leaf)
    return next(found, format_tensor(leaf, leaf.shape))


def format_tensor(tensor: Tensor, shape: Sequence[int]) -> str:
    """Return a dtype and a shape as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"


def find_origin() -> OperatorOrigin:
    """Return the present line of the script, and the module whose `forward` runs, from the stack."""
    frame: Any = sys._getframe(1)
    line, calls = user_line(frame), list[Any]()
    while frame is not None:
        if frame.f_code is CALL_MODULE:
            calls.append(frame)
        frame = frame.f_back
    return OperatorOrigin(line, name_module(calls) if calls else None)


def name_module(calls: Sequence[Any]) -> ModuleName:
    """Return the name of the innermost module of some calls, innermost first: it begins as the script names the model.

    Args:
        calls: The frames of `nn.Module._call_impl`.
    """
    inner, outer, caller = calls[0].f_locals["self"], calls[-1].f_locals["self"], calls[-1]
    if outer not in NAMES or id(inner) not in NAMES[outer]:
        while caller.f_back is not None and not is_user_code(caller.f_code.co_filename):
            caller = caller.f_back
        known = {**caller.f_globals, **caller.f_locals}
        models = ((name, value) for name, value in known.items() if issubclass(type(value), nn.Module))
        names = (f"{name}.{path}" for name, model in models for path, item in model.named_modules() if item is outer)
        root = next(names, type(outer).__name__).removesuffix(".")
        paths = {id(item): f"{root}.{path}" if path else root for path, item in outer.named_modules()}
        NAMES[outer] = {id(inner): type(inner).__name__} | paths
    return ModuleName(str(NAMES[outer][id(inner)]), type(inner).__name__)
