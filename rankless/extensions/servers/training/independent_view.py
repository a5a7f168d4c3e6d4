"""The view of a run whose workers train on batches of their own: each makes every W-th call, as on one device.

Note [calls of other workers]: all workers run the whole script on the same whole batches. Call i of a train job is made
by worker i mod W. So schedules, epochs and messages of the script are those of one device. The others return at once,
with the numbers of their own last call as an estimate. A result with an element per sample is of no use then, and says
so when the script uses it.
"""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.compiler.capture.result_structure import map_result
from rankless.context.world import World
from rankless.errors import ConfigError, TableError
from rankless.extensions.servers.training.independent_workers import IndependentWorkers
from rankless.extensions.servers.training.job_tables import JobTables
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.job_definition import CallResult, JobDefinition, detach_leaf
from rankless.jobs.views.one_device import PlainView


class IndependentView:
    """Runs every W-th call of a train job on this worker, on parameters that servers hold."""

    def __init__(self, job: JobDefinition, world: World, independent: IndependentWorkers, tables: JobTables) -> None:
        """Raise ConfigError for a job whose workers would need their own slices of a batch, or several calls."""
        _require_usable(job)
        self._job, self._world, self._independent = job, world, independent
        self._plain = PlainView(job, world)
        self._tables = tables
        self._calls = 0
        self._latest: CallResult | None = None
        self._seed = torch.initial_seed()
        self._device = job.device(world.mesh.device)

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the job's result. Only for a call of this worker it has a loss."""
        self._tables.share()
        if not self._job.trains:
            self._independent.meet(f"job {self._job.name!r}")
            return self._plain.run(arguments)
        number, self._calls = self._calls, self._calls + 1
        worker = number % self._independent.workers.size
        is_own = worker == self._independent.workers.rank
        self._share_parameters(is_own=is_own)
        label = f"{self._job.name!r} at {self._job.line}"
        self._independent.count_call(label, arguments.tensors, self._job.modules.values())
        if is_own:
            return self._train(number, arguments)
        self._count_step()
        if self._latest is None:
            return CallResult(self._evaluate(number, arguments), is_elsewhere=True)
        result = map_result(lambda leaf: self._estimate(leaf, worker), self._latest.result)
        return CallResult(result, is_elsewhere=True)

    def _share_parameters(self, *, is_own: bool) -> None:
        """Let the servers have the job's parameters. After a meeting all workers look for changes, at the same call."""
        is_current = self._independent.is_current
        weights = [table.weight for table in self._tables.find()]
        self._independent.parameters.share(
            self._job.optimizers,
            weights,
            self._tables.list_sparse_weights(),
            is_current=is_current,
            compares=is_current or is_own,
        )

    def _train(self, number: int, arguments: FlattenedArguments) -> CallResult:
        """Set gradients for the servers' present parameters."""
        parameters = self._job.parameters()
        self._independent.begin_step()
        self._independent.parameters.pull(parameters)
        with self._own_random_numbers(number):
            self._latest = self._plain.run(arguments)
        changed = self._independent.parameters.find_changed(parameters)
        if changed is not None:
            raise TableError(
                expected="a job that leaves its parameters to the optimizer, because servers hold them",
                found=f"it changes {self._job.parameter_name(changed)}",
                fix="change parameters by the optimizer only, or use --server-mode sync",
                where=self._job.line,
            )
        return self._latest

    def _evaluate(self, number: int, arguments: FlattenedArguments) -> Any:
        """Return the result of a call that another worker makes, before this worker has made one."""
        args, kwargs = arguments.unflatten(arguments.tensors)
        buffers = [buffer for module in self._job.modules.values() for buffer in module.buffers()]
        before = [buffer.detach().clone() for buffer in buffers]
        with self._own_random_numbers(number), torch.no_grad():
            result = self._job.function(*args, **kwargs)
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        return map_result(detach_leaf, result)

    def _estimate(self, leaf: Any, worker: int) -> Any:
        is_number = not isinstance(leaf, Tensor) or leaf.dim() == 0
        return leaf if is_number else ResultElsewhere(self._job, worker)

    def _count_step(self) -> None:
        """Let schedulers know that there has been a step. PyTorch warns of schedules that run ahead of it."""
        for optimizer in self._job.optimizers:
            with _without_gradients([each for group in optimizer.param_groups for each in group["params"]]):
                optimizer.step()

    @contextlib.contextmanager
    def _own_random_numbers(self, number: int) -> Iterator[None]:
        """Within the context, draw the numbers of one call. After it the script's generator is as on other workers."""
        seed = np.random.SeedSequence([self._seed, zlib.crc32(self._job.name.encode()), number]).generate_state(1)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(seed[0]))
            yield


class ResultElsewhere:
    """Stands for a result whose batch another worker has taken. Using it raises ConfigError."""

    def __init__(self, job: JobDefinition, worker: int) -> None:
        object.__setattr__(self, "_about", (job.name, job.line, worker))

    def __repr__(self) -> str:
        return f"<result on worker {object.__getattribute__(self, '_about')[2]}>"

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        found._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        name, line, worker = object.__getattribute__(self, "_about")
        raise ConfigError(
            expected=f"of job {name!r} only single numbers, where workers train on batches of their own",
            found=f"the use of a result with several elements, of a batch that worker {worker} has taken",
            fix="return the number that you need, as (logits.argmax(-1) == labels).sum(), or use --server-mode sync",
            where=line,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __array__ = __format__ = _refuse


@contextlib.contextmanager
def _without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _require_usable(job: JobDefinition) -> None:
    options = job.step_options
    found = next(
        (
            text
            for text, is_set in (
                ('view="mirrored", whose workers have slices of their own', job.view == "mirrored"),
                (f"accumulate={options.accumulate}", options.accumulate > 1),
                (f"zero={options.zero!r}", options.zero is not None),
            )
            if is_set
        ),
        None,
    )
    if found is not None:
        raise ConfigError(
            expected="a job whose every call is one step on a whole batch, where workers train on batches of their own",
            found=found,
            fix="omit it, or use --server-mode sync",
            where=job.line,
        )
