"""What workers are told, without starting any."""

import pytest

from rankless.launch.assembly import Assembled
from rankless.launch.company import Nobody
from rankless.launch.workers import plan_workers
from rankless.plan import check
from rankless.plan.run_plan import JobStart, Program, RunRequest


def test_gpus_are_seen_in_the_order_that_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = check.make_run_plan(Program(kind="script", target=__file__), RunRequest(worker_count=3, devices="3,1"))
    place = {"master_address": "127.0.0.1", "master_port": 1, "store_address": "127.0.0.1", "store_port": 2}
    start = JobStart(run_id="run", seed=None, workers=(3,), backend="gloo", **place)
    launches = plan_workers(plan, Assembled(others=Nobody(), start=start, devices=(plan.devices,)), folder="log")
    assert [launch.plan.device for launch in launches] == ["cuda:0", "cuda:1", "cuda:0"]
    assert {launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches} == {"3,1"}
