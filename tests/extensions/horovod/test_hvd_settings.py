"""Horovod's environment variables, and their effects on a job."""

import os

import pytest
import torch
from support.processes import on_mesh

from rankless.extensions.horovod.settings import Settings, read_settings
from rankless.parallel.mesh import Mesh

READ = [
    ("FUSION_THRESHOLD", "4096", {"fusion_bytes": 4096}),
    ("FUSION_THRESHOLD", "0", {"fusion_bytes": 0}),
    ("CYCLE_TIME", "2.5", {"cycle_seconds": 0.0025, "outstanding_seconds": 0.0025}),
    ("CACHE_CAPACITY", "0", {"cache_capacity": 0}),
    ("TIMELINE", "DYNAMIC", {"timeline": "DYNAMIC"}),
    ("TIMELINE_MARK_CYCLES", "1", {"marks_cycles": True}),
    ("STALL_CHECK_DISABLE", "1", {"stall_seconds": 0.0}),
    ("STALL_CHECK_DISABLE", "0", {}),
    ("STALL_CHECK_TIME_SECONDS", "7", {"stall_seconds": 7.0}),
    ("STALL_SHUTDOWN_TIME_SECONDS", "9", {"stall_shutdown_seconds": 9.0}),
    ("GLOO_TIMEOUT_SECONDS", "11", {"timeout_seconds": 11.0}),
    ("START_TIMEOUT", "13", {"start_timeout_seconds": 13.0}),
    ("DYNAMIC_PROCESS_SETS", "1", {"dynamic_process_sets": True}),
    ("DISABLE_GROUP_FUSION", "1", {"splits_groups": True}),
    ("CYCLE_TIME", "soon", {}),
]


@pytest.mark.parametrize(("name", "value", "fields"), READ)
def test_a_variable_is_read(name: str, value: str, fields: dict[str, object]):
    assert read_settings({name: value}) == Settings(**fields)  # type: ignore[arg-type]


def test_defaults_are_horovods():
    plain = read_settings({})
    assert (plain.cache_capacity, plain.fusion_bytes) == (1024, 128 << 20)
    assert (plain.stall_seconds, plain.stall_shutdown_seconds) == (60.0, 0.0)


def work(_: Mesh, variables: dict[str, str]) -> list[float]:
    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # in a worker process

    os.environ.update(variables)
    try:
        hvd.init()
    finally:
        for name in variables:
            del os.environ[name]
    try:
        found = []
        for step in range(3):
            given = [torch.full((count,), float(step)) for count in (3, 20_000, 30_000)]
            handles = [hvd.allreduce_async(one, name=f"{place}", op=hvd.Sum) for place, one in enumerate(given)]
            handles.append(hvd.grouped_allreduce_async(given, name="group", op=hvd.Sum))
            *singles, group = [hvd.synchronize(handle) for handle in handles]
            assert all(len(one.unique()) == 1 for one in (*singles, *group))
            found += [one[0].item() for one in (*singles, *group)]
        return found
    finally:
        hvd.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"HOROVOD_FUSION_THRESHOLD": "0"},
        {"HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_DISABLE_GROUP_FUSION": "1"},
        {"HOROVOD_DISABLE_GROUP_FUSION": "1", "HOROVOD_CACHE_CAPACITY": "0"},
        {"HOROVOD_CYCLE_TIME": "2"},
        {"HOROVOD_CACHE_CAPACITY": "2"},
    ],
    ids=lambda variables: "+".join(name.removeprefix("HOROVOD_") for name in variables),
)
def test_results_are_the_same_with_any_tuning(variables: dict[str, str]):
    assert on_mesh(2, work, variables) == [[2.0 * step for step in range(3) for _ in range(6)]] * 2
