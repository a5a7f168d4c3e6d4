"""What is refused before any process starts, and what is chosen for the user."""

from pathlib import Path

import pytest

from rankless.config import make_run_config
from rankless.config.backend_and_fault_tolerance import choose_backend
from rankless.config.run_config import Program, RunRequest
from rankless.errors import ConfigError


@pytest.fixture
def script(tmp_path: Path) -> Program:
    (tmp_path / "train.py").write_text("import rankless")
    return Program(kind="script", target=str(tmp_path / "train.py"))


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_run_config, "count_gpus", lambda: count)


def test_every_worker_gets_its_own_gpu_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(4, monkeypatch)
    assert make_run_config.choose_devices(None, worker_count=3) == ("cuda:0", "cuda:1", "cuda:2")


def test_the_cpu_is_the_default_without_gpus_and_can_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(0, monkeypatch)
    assert make_run_config.choose_devices(None, worker_count=2) == ("cpu", "cpu")
    with_gpus(4, monkeypatch)
    assert make_run_config.choose_devices("cpu", worker_count=2) == ("cpu", "cpu")


def test_two_workers_on_one_gpu_use_gloo_and_one_on_each_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(4, monkeypatch)
    shared = make_run_config.choose_devices("1,3", worker_count=3)
    assert shared == ("cuda:1", "cuda:3", "cuda:1")
    assert choose_backend([shared]).name == "gloo"
    assert choose_backend([make_run_config.choose_devices("1,3", worker_count=2)]).name == "nccl"


@pytest.mark.parametrize("wish", ["0,4", "7", "x", "", "cpu,0"])
def test_missing_devices_are_rejected(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(2, monkeypatch)
    with pytest.raises(ConfigError):
        make_run_config.choose_devices(wish, worker_count=1)


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_run_config.glob, "glob", lambda _pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert make_run_config.count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert make_run_config.count_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make_run_config.count_gpus() == 0


def test_cores_are_divided_and_each_worker_gets_at_least_one(script: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(make_run_config, "core_count", lambda: 8)
    threads = [
        make_run_config.make_run_config(script, RunRequest(worker_count=n)).threads_per_worker for n in (1, 3, 16)
    ]
    assert threads == [8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert make_run_config.make_run_config(script, RunRequest(worker_count=2)).threads_per_worker == 5


def test_without_a_seed_every_run_has_another(script: Program) -> None:
    seeds = {make_run_config.make_run_config(script, RunRequest(worker_count=1)).seed for _ in range(5)}
    foreign = Program(kind="code", target="import torch")
    assert len(seeds) == 5
    assert make_run_config.make_run_config(foreign, RunRequest(worker_count=1)).seed is None
    assert make_run_config.make_run_config(script, RunRequest(worker_count=1, seed=0)).seed == 0


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_rejected(seed: int, script: Program) -> None:
    with pytest.raises(ConfigError, match="seed"):
        make_run_config.make_run_config(script, RunRequest(worker_count=1, seed=seed))
