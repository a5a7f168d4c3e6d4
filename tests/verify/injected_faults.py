"""Faults that a script injects into its own run on several workers: `inject("name")`.

Each takes effect at the third training step (`FIRST_STEP`), so that `verify` must also find where it begins. Tests copy
this file beside the script and do not import it.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import SGD, Optimizer

from rankless.compiler.ir import local_kernels
from rankless.compiler.lowering.lower import LoweringPass
from rankless.compiler.scheduling import gradient_buckets
from rankless.compiler.scheduling.gradient_buckets import GradientBucket
from rankless.compiler.sharding.redistribute import StackingAllGather
from rankless.data.loader import Loader
from rankless.jobs.programs import bound_program
from rankless.jobs.views.view_choice_and_recovery import WorldView
from rankless.parallel.mesh import Mesh

FIRST_STEP = 3
RANK = int(os.environ["RANK"])
WORKERS = int(os.environ["WORLD_SIZE"])


class StepCounter:
    """The number of the current training step, from 1."""

    def __init__(self) -> None:
        self.step = 0

    @property
    def is_late(self) -> bool:
        return self.step >= FIRST_STEP


def inject(name: str) -> None:
    """Inject a fault by its function's name if there are several workers; "nothing" injects nothing."""
    if WORKERS > 1 and name != "nothing":
        counter = StepCounter()
        run = WorldView.run

        def count_steps(self: WorldView, world: Any, arguments: Any) -> Any:
            counter.step += self._job.trains
            return run(self, world, arguments)

        WorldView.run = count_steps
        globals()[name](counter)


def dropped_gradient_reduction(counter: StepCounter) -> None:
    start = gradient_buckets.start_all_reduce
    gradient_buckets.start_all_reduce = lambda flat, among: None if counter.is_late else start(flat, among=among)


def gradient_scaled_by_workers(counter: StepCounter) -> None:
    finish = GradientBucket.finish

    def scale(self: GradientBucket) -> list[Tensor]:
        return [value * WORKERS if counter.is_late else value for value in finish(self)]

    GradientBucket.finish = scale


def replace_count(counter: StepCounter, wrong: Callable[[Tensor], Tensor]) -> None:
    all_reduce = LoweringPass.all_reduce

    def replace(self: LoweringPass, value: fx.Node, reason: str, size: int) -> fx.Node:
        correct = all_reduce(self, value, reason, size)
        if not reason.startswith("number of valid targets"):
            return correct
        return self.call(lambda total, local: wrong(local) if counter.is_late else total, correct, value)

    LoweringPass.all_reduce = replace


def dropped_count_reduction(counter: StepCounter) -> None:
    replace_count(counter, lambda local: local)


def mean_of_means(counter: StepCounter) -> None:
    replace_count(counter, lambda local: local * WORKERS)


def local_batch_norm_statistics(counter: StepCounter) -> None:
    gather = StackingAllGather.__call__

    def repeat_local(self: StackingAllGather, value: Tensor) -> Tensor:
        everyone = gather(self, value)
        return torch.stack([value] * len(everyone)) if counter.is_late else everyone

    StackingAllGather.__call__ = repeat_local


def running_statistics_not_updated(counter: StepCounter) -> None:
    batch_norm = local_kernels.batch_norm

    def stale(x: Tensor, affine: Any, running: Any, *rest: Any) -> Any:
        results = batch_norm(x, affine, running, *rest)
        return (*results[:3], *(value.clone() for value in running)) if counter.is_late else results

    local_kernels.batch_norm = stale


def other_seed_on_one_rank(counter: StepCounter) -> None:
    dropout_mask = local_kernels.draw_dropout_mask

    def draw(*arguments: Any) -> Tensor:
        if counter.step == FIRST_STEP and RANK == 1:
            torch.manual_seed(99)
        return dropout_mask(*arguments)

    local_kernels.draw_dropout_mask = draw


def change_batches(change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    iterate = Loader.__iter__
    Loader.__iter__ = lambda self: change(iterate(self))


def skipped_batch(_counter: StepCounter) -> None:
    change_batches(lambda batches: (batch for number, batch in enumerate(batches, start=1) if number != FIRST_STEP))


def skipped_batch_on_one_rank(_counter: StepCounter) -> None:
    """One rank skips a batch, and repeats its last one so that it makes as many steps as the others."""

    def skip(batches: Iterator[Any]) -> Iterator[Any]:
        batches_left = [batch for number, batch in enumerate(batches, start=1) if number != FIRST_STEP or RANK != 1]
        yield from batches_left
        if RANK == 1:
            yield batches_left[-1]

    change_batches(skip)


def repeated_batch(_counter: StepCounter) -> None:
    def repeat(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, start=1):
            yield batch
            if number == FIRST_STEP - 1:
                yield batch

    change_batches(repeat)


def row_given_twice(counter: StepCounter) -> None:
    """A rank takes one row twice in place of its last row, which no rank takes."""
    get_local_shard = bound_program.get_local_shard

    def repeat_row(argument: Tensor, placement: Any, mesh: Mesh) -> Tensor:
        piece = get_local_shard(argument, placement, mesh)
        return torch.cat([piece[:-1], piece[:1]]) if counter.is_late and RANK == 1 else piece

    bound_program.get_local_shard = repeat_row


def change_steps(change: Callable[[Optimizer, Callable[[], Any]], None]) -> None:
    step = SGD.step
    SGD.step = lambda self: change(self, lambda: step(self))


def wrong_learning_rate(counter: StepCounter) -> None:
    def step_faster(optimizer: Optimizer, step: Callable[[], Any]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1.001 if counter.is_late else 1)
        step()

    change_steps(step_faster)


def skipped_optimizer_step(counter: StepCounter) -> None:
    change_steps(lambda _optimizer, step: None if counter.step == FIRST_STEP else step())


def stale_parameters_on_one_rank(counter: StepCounter) -> None:
    change_steps(lambda _optimizer, step: None if counter.step == FIRST_STEP and RANK == 1 else step())
