"""Faults planted in the engine of runs on several workers, as a script asks for them: `inject("name")`.

Each takes effect at the third training step (`FROM`), so that what finds it must also tell when it began. This file
is copied beside the script; it is not imported by tests.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import SGD, Optimizer

from rankless.compiler.ir import local_kernels
from rankless.compiler.lowering.lower import LoweringPass
from rankless.compiler.scheduling import schedule
from rankless.compiler.scheduling.schedule import GradientBucket
from rankless.compiler.sharding.redistribute import StackedGather
from rankless.data.loader import Loader
from rankless.jobs import consistent
from rankless.jobs.consistent import ConsistentView
from rankless.parallel.mesh import Mesh

FROM = 3
RANK = int(os.environ["RANK"])
WORKERS = int(os.environ["WORLD_SIZE"])


class Clock:
    """Which training step is being made, from 1."""

    def __init__(self) -> None:
        self.step = 0

    @property
    def late(self) -> bool:
        return self.step >= FROM


def inject(name: str) -> None:
    """Plant a fault by its function's name, if there are several workers; "nothing" plants nothing."""
    if WORKERS > 1 and name != "nothing":
        clock = Clock()
        run = ConsistentView.run

        def counted(self: ConsistentView, arguments: Any) -> Any:
            clock.step += self._job.trains
            return run(self, arguments)

        ConsistentView.run = counted
        globals()[name](clock)


def dropped_gradient_reduction(clock: Clock) -> None:
    start = schedule.start_all_reduce
    schedule.start_all_reduce = lambda flat, mesh: None if clock.late else start(flat, mesh=mesh)


def gradient_scaled_by_workers(clock: Clock) -> None:
    finish = GradientBucket.finish

    def scaled(self: GradientBucket) -> list[Tensor]:
        return [value * WORKERS if clock.late else value for value in finish(self)]

    GradientBucket.finish = scaled


def instead_of_the_count(clock: Clock, wrong: Callable[[Tensor], Tensor]) -> None:
    all_reduce = LoweringPass.all_reduce

    def replaced(self: LoweringPass, value: fx.Node, reason: str, size: int) -> fx.Node:
        right = all_reduce(self, value, reason, size)
        if not reason.startswith("number of valid targets"):
            return right
        return self.call(lambda total, mine: wrong(mine) if clock.late else total, right, value)

    LoweringPass.all_reduce = replaced


def dropped_count_reduction(clock: Clock) -> None:
    instead_of_the_count(clock, lambda mine: mine)


def mean_of_means(clock: Clock) -> None:
    instead_of_the_count(clock, lambda mine: mine * WORKERS)


def local_batch_norm_statistics(clock: Clock) -> None:
    gather = StackedGather.__call__

    def repeated(self: StackedGather, value: Tensor) -> Tensor:
        everyone = gather(self, value)
        return torch.stack([value] * len(everyone)) if clock.late else everyone

    StackedGather.__call__ = repeated


def running_statistics_not_updated(clock: Clock) -> None:
    batch_norm = local_kernels.batch_norm

    def stale(x: Tensor, affine: Any, running: Any, *rest: Any) -> Any:
        results = batch_norm(x, affine, running, *rest)
        return (*results[:3], *(value.clone() for value in running)) if clock.late else results

    local_kernels.batch_norm = stale


def other_seed_on_one_rank(clock: Clock) -> None:
    dropout_mask = local_kernels.draw_dropout_mask

    def drawn(*arguments: Any) -> Tensor:
        if clock.step == FROM and RANK == 1:
            torch.manual_seed(99)
        return dropout_mask(*arguments)

    local_kernels.draw_dropout_mask = drawn


def change_batches(change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    iterate = Loader.__iter__
    Loader.__iter__ = lambda self: change(iterate(self))


def skipped_batch(_clock: Clock) -> None:
    change_batches(lambda batches: (batch for place, batch in enumerate(batches, start=1) if place != FROM))


def skipped_batch_on_one_rank(_clock: Clock) -> None:
    """It comes to one batch too early, and repeats its last so as to make as many steps as the others."""

    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        kept = [batch for place, batch in enumerate(batches, start=1) if place != FROM or RANK != 1]
        yield from kept
        if RANK == 1:
            yield kept[-1]

    change_batches(ahead)


def repeated_batch(_clock: Clock) -> None:
    def repeating(batches: Iterator[Any]) -> Iterator[Any]:
        for place, batch in enumerate(batches, start=1):
            yield batch
            if place == FROM - 1:
                yield batch

    change_batches(repeating)


def row_given_twice(clock: Clock) -> None:
    """A rank reads one row again in place of its last, which nobody reads."""
    get_local_piece = consistent.get_local_piece

    def dropped(argument: Tensor, placement: Any, mesh: Mesh) -> Tensor:
        piece = get_local_piece(argument, placement, mesh)
        return torch.cat([piece[:-1], piece[:1]]) if clock.late and RANK == 1 else piece

    consistent.get_local_piece = dropped


def change_steps(change: Callable[[Optimizer, Callable[[], Any]], None]) -> None:
    step = SGD.step
    SGD.step = lambda self: change(self, lambda: step(self))


def wrong_learning_rate(clock: Clock) -> None:
    def faster(optimizer: Optimizer, step: Callable[[], Any]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1.001 if clock.late else 1)
        step()

    change_steps(faster)


def skipped_optimizer_step(clock: Clock) -> None:
    change_steps(lambda _optimizer, step: None if clock.step == FROM else step())


def stale_parameters_on_one_rank(clock: Clock) -> None:
    change_steps(lambda _optimizer, step: None if clock.step == FROM and RANK == 1 else step())
