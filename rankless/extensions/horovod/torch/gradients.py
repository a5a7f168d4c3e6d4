"""Combines gradients over the ranks while backward computes others.

Note [inline gradients]: sending small values inline is faster for one tensor, and slower for many. So gradients are
sent inline only if those of the whole model are small. This is the same on all ranks, whatever they batch.

Note [batches]: a complete gradient waits until 4 MiB are complete, or until backward ends. Then all are submitted at
once. Each operation keeps its own name, so ranks may batch them differently. Smaller batches cost more time than they
overlap. For an MLP of 8 MiB and two ranks on two busy cores, a step takes 34 ms of processor time with batches of 1
MiB, and 30 ms with 4 MiB.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.process_sets import ProcessSet
from rankless.extensions.horovod.common.util import split_list
from rankless.extensions.horovod.engine.operation_scheduler import OperationScheduler
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind
from rankless.extensions.horovod.exceptions import HorovodInternalError
from rankless.extensions.horovod.torch.compression import Compressor
from rankless.extensions.horovod.torch.functions import broadcast_object
from rankless.extensions.horovod.torch.operations.allgather import sparse_allreduce_async
from rankless.extensions.horovod.torch.operations.checks import resolve_set_id, validate_tensor
from rankless.extensions.horovod.torch.operations.handles import make_group_requests
from rankless.extensions.horovod.torch.operations.reduction_rule import ReductionRule

BATCH_BYTES = 4 << 20
SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class GradientRule:
    """How every gradient is reduced."""

    reduction: ReductionRule
    compression: type[Compressor]
    sparse_as_dense: bool


@dataclass(frozen=True)
class SentGradient:
    """A gradient that was submitted for reduction."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    buffer: torch.Tensor
    """The tensor that is sent, and receives the result. Often it is the gradient itself."""
    context: Any
    """The compressor's context."""


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


class GradientReduction:
    """Reduces the gradients of the parameters, once for each step."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        passes: int,
        rule: GradientRule,
        groups: Mapping[torch.Tensor, GradientGroup],
    ) -> None:
        self.passes = BackwardPasses(names, passes, self._complete)
        self._lock = threading.RLock()
        """Backward runs one thread per device of the model."""
        self._names = dict(names)
        self._rule = rule
        self._groups = groups
        self._sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in names}
        self._is_small = sum(self._sizes.values()) <= SMALL_BYTES
        self._sparse_dims: dict[torch.Tensor, int] = {}
        """The number of sparse dims of each parameter that has had a sparse gradient."""
        self._forget()

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. A parameter without a gradient takes part with zeros.

        Raises HorovodInternalError if the ranks' gradients do not match.
        """
        try:
            self._complete_all()
            self._send_batch()
            self._receive()
        finally:
            self.restart()

    def restart(self) -> None:
        """Discard submitted gradients, and restart the count of backward passes."""
        for scheduler, handle, _ in self._sent:
            scheduler.discard(handle)
        self.passes.restart()
        for group in self._groups.values():
            group.restart()
        self._forget()

    @property
    def groups(self) -> list[list[torch.Tensor]]:
        """The parameters of each group of gradients that are reduced together."""
        return [list(group.parameters) for group in dict.fromkeys(self._groups.values())]

    def add(self, names: Mapping[torch.Tensor, str]) -> None:
        """Reduce the gradients of further parameters, from the next backward pass on."""
        self._names.update(names)
        self._sizes.update((parameter, parameter.numel() * parameter.element_size()) for parameter in names)
        self._is_small = sum(self._sizes.values()) <= SMALL_BYTES
        self.passes.watch(names)

    def send(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Submit a parameter's gradient now, and return its handle and the compressor's context."""
        with self._lock:
            self._batch.append(parameter)
            self._send_batch()
            return self.get_handles()[parameter]

    def get_handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        """Return the handle and the compressor's context of each complete gradient. The handle may be None yet."""
        found: dict[torch.Tensor, tuple[Any, Any]] = dict.fromkeys(self._batch, (None, None))
        found.update((parameter, (handle, None)) for parameter, _, handle in self._sparse_sent)
        for _, handle, sent in self._sent:
            found.update((one.parameter, (handle, one.context)) for one in sent)
        return found

    def _forget(self) -> None:
        self._batch: list[torch.Tensor] = []
        self._batch_bytes = 0
        self._is_flush_queued = False
        self._sent: list[tuple[OperationScheduler, int, list[SentGradient]]] = []
        self._sparse_sent: list[tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]] = []

    def _complete(self, parameter: torch.Tensor) -> None:
        """Submit the parameter's complete gradient, alone or together with others."""
        with self._lock:
            if self._groups and (group := self._groups.get(parameter)) is not None:
                self._count_in_group(group)
                return
            self._batch.append(parameter)
            self._batch_bytes += self._sizes[parameter]
            if self._batch_bytes >= BATCH_BYTES:
                self._send_batch()
            elif not self._is_flush_queued:
                self._is_flush_queued = True
                Variable._execution_engine.queue_callback(self._end_backward)

    def _count_in_group(self, group: GradientGroup) -> None:
        group.missing -= 1
        if group.missing == 0:
            self._send_group(group)

    def _end_backward(self) -> None:
        with self._lock:
            self._is_flush_queued = False
            self._send_batch()

    def _complete_all(self) -> None:
        """Complete the gradients that backward has not completed."""
        for parameter in self.passes.get_incomplete():
            if parameter.grad is None:
                parameter.grad = self._zero_gradient(parameter)
            group = self._groups.get(parameter)
            if group is None:
                self._batch.append(parameter)
            else:
                self._count_in_group(group)

    def _zero_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        dims = self._sparse_dims.get(parameter)
        if dims is None:
            return torch.zeros_like(parameter, requires_grad=False)
        values = parameter.new_empty((0, *parameter.shape[dims:]), requires_grad=False)
        indices = torch.empty((dims, 0), dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)

    def _send_batch(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if not batch:
            return
        set_id = self._set_id()
        sent: list[SentGradient] = []
        requests: list[EngineRequest] = []
        for parameter in batch:
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._sparse_dims[parameter] = parameter.grad.sparse_dim()
                if not self._rule.sparse_as_dense:
                    self._send_sparse(parameter, parameter.grad)
                    continue
            sent_gradient = self._prepare(parameter)
            sent.append(sent_gradient)
            name = self._names[parameter]
            requests.append(
                EngineRequest(kind=OperationKind.ALLREDUCE, name=name, set_id=set_id, **self._fields(sent_gradient))
            )
        if requests:
            self._submit(requests, sent)

    def _send_group(self, group: GradientGroup) -> None:
        sent = [self._prepare(parameter) for parameter in group.parameters]
        name = self._names[group.parameters[0]]
        members = [self._fields(sent_gradient) for sent_gradient in sent]
        self._submit(make_group_requests(OperationKind.ALLREDUCE, name, self._set_id(), members), sent)

    def _send_sparse(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        rule = self._rule.reduction
        handle = sparse_allreduce_async(gradient, self._names[parameter], rule.reduction, rule.process_set)
        self._sparse_sent.append((parameter, gradient, handle))

    def _set_id(self) -> int:
        return resolve_set_id(self._rule.reduction.process_set, OperationKind.ALLREDUCE)

    def _prepare(self, parameter: torch.Tensor) -> SentGradient:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = self._zero_gradient(parameter)
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        small, context = self._rule.compression.compress(dense)
        return SentGradient(parameter, gradient, validate_tensor(small.contiguous()), context)

    def _fields(self, sent_gradient: SentGradient) -> dict[str, Any]:
        return {
            "tensor": sent_gradient.buffer,
            "output": sent_gradient.buffer,
            "allow_inline": self._is_small,
            **self._rule.reduction.fields,
        }

    def _submit(self, requests: list[EngineRequest], sent: list[SentGradient]) -> None:
        scheduler = context.current().scheduler
        handle = scheduler.new_handle()
        try:
            scheduler.submit(handle, requests)
        except HorovodInternalError:
            # Backward ends here. Elastic training restarts with the same optimizer.
            self.restart()
            raise
        self._sent.append((scheduler, handle, sent))

    def _receive(self) -> None:
        """Write the results into the gradients. Raises the first failure after all results have arrived."""
        failure: HorovodInternalError | None = None
        for scheduler, handle, sent in self._sent:
            try:
                scheduler.synchronize(handle)
            except HorovodInternalError as error:
                failure = failure or error
                continue
            for sent_gradient in sent:
                self._write_result(
                    self._rule.compression.decompress(sent_gradient.buffer, sent_gradient.context),
                    sent_gradient.gradient,
                )
        for _, gradient, get_result in self._sparse_sent:
            try:
                self._write_result(get_result(), gradient)
            except HorovodInternalError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _write_result(self, result: torch.Tensor, gradient: torch.Tensor) -> None:
        if result is gradient:
            return
        if gradient.is_sparse:
            gradient.zero_().add_(result if result.is_sparse else result.to_sparse())
        else:
            gradient.copy_(result)


TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


class BackwardPasses:
    """Counts the passes of each parameter with hooks, which it removes at its end.

    Args:
        parameters: The parameters to watch.
        passes: The number of passes that make a gradient complete.
        on_complete: Called with the parameter when its gradient is complete.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], passes: int, on_complete: Callable[[torch.Tensor], None]
    ) -> None:
        self.has_gradients = False
        """Whether backward has computed a gradient since the last `restart`."""
        self._passes = passes
        self._on_complete = on_complete
        self._remaining: dict[torch.Tensor, int] = {}
        hooks: list[Any] = []
        self._hooks = hooks
        # A parameter outlives the optimizers made for it. Their hooks must not keep them alive.
        self._finalizer = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the passes of further parameters, from the next pass on."""
        reference = weakref.ref(self)
        for parameter in parameters:
            self._remaining[parameter] = self._passes
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_make_hook(reference)))

    @property
    def remaining(self) -> dict[torch.Tensor, int]:
        """How many passes each parameter still needs."""
        return self._remaining

    @property
    def passes(self) -> int:
        """The number of passes that make a gradient complete. Setting it restarts the count."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        self._remaining = dict.fromkeys(self._remaining, passes)

    def get_incomplete(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are not complete."""
        return [parameter for parameter, remaining in self._remaining.items() if remaining > 0]

    def restart(self) -> None:
        """Restart the count, as after a step."""
        self._remaining = dict.fromkeys(self._remaining, self._passes)
        self.has_gradients = False

    def count(self, parameter: torch.Tensor) -> None:
        """Count a pass that has computed the parameter's gradient."""
        remaining = self._remaining[parameter] - 1
        if remaining < 0:
            raise AssertionError(TOO_MANY)
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad:
            raise AssertionError("Gradients that have gradients themselves (create_graph=True) cannot be reduced.")
        self._remaining[parameter] = remaining
        self.has_gradients = True
        if remaining == 0:
            self._on_complete(parameter)


def _make_hook(passes: weakref.ref[BackwardPasses]) -> Callable[[torch.Tensor], None]:
    def count_pass(parameter: torch.Tensor) -> None:
        counter = passes()
        if counter is not None:
            counter.count(parameter)

    return count_pass
