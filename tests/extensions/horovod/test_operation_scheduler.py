"""The operation scheduler between real processes: results, orders, shutdowns."""

import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.processes import on_mesh
from support.warm_runs import run_script

from rankless.collectives.backends.shared_group import NO_MEMORY
from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.exceptions import HorovodInternalError
from rankless.extensions.horovod.engine import backends, operation_scheduler
from rankless.extensions.horovod.engine.operation_scheduler import OperationScheduler
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind, ReduceOpCode
from rankless.parallel.mesh import Mesh

SIZES = {"is sent inline": 100, "is reduced in shared memory": 40_000, "takes several chunks": 700_001}


def begin(scheduler: OperationScheduler, tensor: torch.Tensor, name: str, **fields: object) -> int:
    handle = scheduler.new_handle()
    one = EngineRequest(
        kind=OperationKind.ALLREDUCE, name=name, tensor=tensor, output=torch.empty_like(tensor), **fields
    )  # type: ignore[arg-type]
    scheduler.submit(handle, [one])
    return handle


def reduce(scheduler: OperationScheduler, tensor: torch.Tensor, name: str, **fields: object) -> torch.Tensor:
    return scheduler.synchronize(begin(scheduler, tensor, name, **fields))[0]


def values(rank: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return ((torch.arange(count) * (rank + 3)) % 101).to(dtype)


def _reduced(mesh: Mesh, count: int, reduction: ReduceOpCode, dtype: torch.dtype) -> torch.Tensor:
    context.init()
    try:
        return reduce(context.current().scheduler, values(mesh.rank, count, dtype), "a", reduction=reduction)
    finally:
        context.shutdown()


ORACLES = {
    ReduceOpCode.SUM: lambda given: given.sum(0),
    ReduceOpCode.AVERAGE: lambda given: given.sum(0) / len(given),
    ReduceOpCode.MIN: lambda given: given.amin(0),
    ReduceOpCode.MAX: lambda given: given.amax(0),
    ReduceOpCode.PRODUCT: lambda given: given.prod(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("reduction", ORACLES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.ci_sample(5)
def test_values_are_reduced_to_the_same_bits_on_all_ranks(how: str, reduction: ReduceOpCode, size: int):
    count = SIZES[how]
    found = on_mesh(size, _reduced, count, reduction, torch.float64)
    expected = ORACLES[reduction](torch.stack([values(rank, count) for rank in range(size)]))
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], expected, rtol=1e-15, atol=0)


def _by_group(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    with mock.patch.object(backends, "open_shared_group", return_value=NO_MEMORY):
        return _reduced(mesh, 40_000, ReduceOpCode.SUM, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bfloat16, torch.uint8])
def test_ranks_without_shared_memory_use_a_group(dtype: torch.dtype):
    found = on_mesh(2, _by_group, dtype)
    assert torch.equal(found[0], values(0, 40_000, dtype) + values(1, 40_000, dtype))
    assert torch.equal(found[0], found[1])


def _in_orders_of_their_own(mesh: Mesh) -> list[float]:
    context.init()
    try:
        scheduler = context.current().scheduler
        names = [f"t{number}" for number in range(30)]
        order = names if mesh.rank == 0 else names[::-1]
        # Some are sent inline, some are not. The values identify the names.
        handles = {
            name: begin(scheduler, torch.full((30_000 if number % 3 else 10,), float(number + mesh.rank)), name)
            for number, name in enumerate(names)
            for name in [order[number]]
            for number in [names.index(name)]
        }
        return [scheduler.synchronize(handles[name])[0][-1].item() for name in names]
    finally:
        context.shutdown()


@pytest.mark.slow
def test_ranks_may_submit_in_any_order():
    found = on_mesh(2, _in_orders_of_their_own)
    assert found == [[2.0 * number + 1 for number in range(30)]] * 2


def _without_waiting(_mesh: Mesh) -> bool:
    """The background thread executes operations that nobody waits for."""
    context.init()
    try:
        scheduler = context.current().scheduler
        handle = begin(scheduler, torch.ones(100_000), "a")
        deadline = time.monotonic() + 30
        while not scheduler.poll(handle) and time.monotonic() < deadline:
            pass
        return scheduler.poll(handle)
    finally:
        scheduler.synchronize(begin(scheduler, torch.ones(1), "end"))
        context.shutdown()


@pytest.mark.slow
def test_an_operation_that_nobody_waits_for_is_executed_too():
    assert on_mesh(2, _without_waiting) == [True, True]


def _many_times(_mesh: Mesh) -> list[float]:
    found = []
    for number in range(20):
        context.init()
        found.append(reduce(context.current().scheduler, torch.full((20_000,), float(number)), "a")[0].item())
        reduce(context.current().scheduler, torch.ones(1), "end")
        context.shutdown()
    return found


@pytest.mark.slow
def test_a_process_may_join_and_leave_any_number_of_times():
    expected = [2.0 * number for number in range(20)]
    assert on_mesh(2, _many_times) == [expected, expected]


def _evicting(_mesh: Mesh) -> list[float]:
    os.environ["HOROVOD_CACHE_CAPACITY"] = "3"
    try:
        context.init()
    finally:
        del os.environ["HOROVOD_CACHE_CAPACITY"]
    try:
        scheduler = context.current().scheduler
        return [
            reduce(scheduler, torch.full((count,), float(number)), f"t{number}")[0].item()
            for _ in range(3)
            for number in range(8)
            for count in (5, 20_000)
        ]
    finally:
        context.shutdown()


@pytest.mark.slow
def test_a_small_cache_changes_nothing():
    expected = [2.0 * number for _ in range(3) for number in range(8) for _ in range(2)]
    assert on_mesh(2, _evicting) == [expected, expected]


DYING = """
import os, sys, torch
from rankless.extensions.horovod import context
from rankless.extensions.horovod.engine.requests import OperationKind, EngineRequest
context.init()
scheduler, rank = context.current().scheduler, context.current().world.rank
if rank == int(sys.argv[1]):
    os._exit(0)
tensor = torch.ones(int(sys.argv[2]))
for number in range(2):
    try:
        handle = scheduler.new_handle()
        request = EngineRequest(kind=OperationKind.ALLREDUCE, name="a", tensor=tensor, output=tensor)
        scheduler.submit(handle, [request])
        scheduler.synchronize(handle)
    except RuntimeError as error:
        print(rank, number, type(error).__name__, error, flush=True)
open(f"{sys.argv[3]}/error{rank}", "w").write("yes")
"""


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 1_000_000])
@pytest.mark.parametrize("who", [0, 1])
def test_when_a_peer_is_gone_the_others_raise_an_error_and_nobody_aborts(who: int, count: int, tmp_path: Path):
    script = DYING.replace("sys.argv[1]", str(who)).replace("sys.argv[2]", str(count))
    job = run_script(script.replace("{sys.argv[3]}", str(tmp_path)), "-n", "3", "--show", "all", folder=tmp_path)
    errors = [line for line in job.stdout.splitlines() if "HorovodInternalError Horovod has been shut down." in line]
    assert len(errors) == 4, job
    assert f"Rank {who} is gone." in job.stdout
    assert all((tmp_path / f"error{rank}").exists() for rank in range(3) if rank != who)


def _stalling(mesh: Mesh, folder: str) -> str:
    os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="0.2", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.6")
    try:
        context.init()
    finally:
        del os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"], os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
    scheduler = context.current().scheduler
    warnings: list[str] = []
    if mesh.rank == 0:
        scheduler._client._stall_detector._warn = warnings.append  # type: ignore[attr-defined]
    done = Path(folder) / "done"
    try:
        if mesh.rank == 0:
            reduce(scheduler, torch.ones(1), "x")
        deadline = time.monotonic() + 30
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    except HorovodInternalError as error:
        return f"{warnings[0]}\n{error}"
    finally:
        done.touch()
        context.shutdown()
    return ""


@pytest.mark.slow
def test_a_rank_that_does_not_submit_is_named_and_can_end_the_job(tmp_path: Path):
    found = on_mesh(2, _stalling, str(tmp_path))[0]
    assert "waiting for remainder of ranks for more than 0.2 seconds" in found
    assert found.count("Missing ranks:\n1: [allreduce.x]") == 2
    assert "Horovod has been shut down." in found


def test_only_small_tensors_on_the_cpu_are_sent_inline():
    def one(count: int, **fields: object) -> EngineRequest:
        tensor = torch.empty(count, dtype=torch.uint8)
        return EngineRequest(kind=OperationKind.ALLREDUCE, tensor=tensor, **fields)  # type: ignore[arg-type]

    assert operation_scheduler.fits_inline([one(operation_scheduler.MAX_BYTES)], 2)
    assert not operation_scheduler.fits_inline([one(operation_scheduler.MAX_BYTES + 1)], 2)
    assert not operation_scheduler.fits_inline([one(operation_scheduler.MAX_BYTES // 2 + 1)] * 2, 2)
    assert not operation_scheduler.fits_inline([one(operation_scheduler.MAX_BYTES)], 8)
    assert not operation_scheduler.fits_inline([one(8, reduction=ReduceOpCode.ADASUM)], 2)
    assert not operation_scheduler.fits_inline([one(8)], 1)
