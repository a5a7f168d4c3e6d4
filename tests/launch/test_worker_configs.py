"""The configurations of workers, without starting any."""

import pytest

from rankless.config import make_run_config
from rankless.config.run_config import AgreedJobConfig, Program, RunRequest
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.prepare_run import ReadyJob
from rankless.launch.worker_configs import make_worker_configs


def test_workers_see_gpus_in_the_requested_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make_run_config, "count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = make_run_config.make_run_config(
        Program(kind="script", target=__file__), RunRequest(worker_count=3, devices="3,1")
    )
    place = {"master_address": "127.0.0.1", "master_port": 1, "store_address": "127.0.0.1", "store_port": 2}
    start = AgreedJobConfig(run_id="run", seed=None, workers=(3,), backend="gloo", **place)
    launches = make_worker_configs(
        config, ReadyJob(peers=Peers(), start=start, devices=(config.devices,)), folder="log"
    )
    assert [launch.config.device for launch in launches] == ["cuda:0", "cuda:1", "cuda:0"]
    assert {launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches} == {"3,1"}
