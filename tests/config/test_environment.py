"""The variables that workers get, and that are read back."""

import os

import pytest

from rankless.config import environment
from rankless.config.environment import changes_too_late
from rankless.config.process_configs import WorkerConfig


def config(process_id: int | None = None) -> WorkerConfig:
    return WorkerConfig(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        device="cpu",
        threads=3,
        backend="gloo",
        master_address="127.0.0.1",
        master_port=4000,
        run_id="r",
        seed=1,
        log_file="rank1.log",
        process_id=process_id,
    )


def test_a_worker_reads_its_config_back_and_its_children_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.WORKER_PLAN, "")
    mine = config(process_id=os.getpid())
    environment.write_worker_config(mine)
    assert environment.read_worker_config() == mine
    environment.write_worker_config(config(process_id=os.getppid()))
    assert environment.read_worker_config() is None


def test_torchruns_variables_are_read_unless_rankless_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(environment.WORKER_PLAN, raising=False)
    found = environment.read_torchrun()
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 1)
    monkeypatch.setenv(environment.WORKER_PLAN, "{}")
    assert environment.read_torchrun() is None


def test_a_worker_gets_the_users_thread_variables_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "4")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    variables = environment.worker_environment(config(), cuda_devices=None)
    assert variables["MKL_NUM_THREADS"] == "4"
    assert variables["OPENBLAS_NUM_THREADS"] is None
    assert variables["OMP_NUM_THREADS"] == "3"


def test_only_variables_that_torch_reads_at_import_change_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment.snapshot()
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "63")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    monkeypatch.setenv("MY_OWN", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by torch's compiler")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    assert changes_too_late(before, environment.snapshot()) == ["KMP_BLOCKTIME", "TORCH_LOGS"]
