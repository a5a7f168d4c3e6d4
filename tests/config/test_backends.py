"""The backend of a run follows from its devices and hosts, unless the user requests another that fits them."""

import errno
from pathlib import Path

import pytest

from rankless.config import (
    available_cpu_and_memory,
    backend_and_fault_tolerance,
    make_run_config,
    shared_memory_support,
)
from rankless.config.backend_and_fault_tolerance import choose_backend, read_requested_backend
from rankless.config.run_config import Program, RunRequest
from rankless.errors import ConfigError

CPU, OWN_GPUS, ONE_GPU = ("cpu", "cpu"), ("cuda:0", "cuda:1"), ("cuda:0", "cuda:0")


@pytest.mark.parametrize(
    ("hosts", "name", "reason"),
    [
        ([CPU], "shared_memory", "all workers are on the CPU of one host"),
        ([CPU, CPU], "hierarchical", "the workers are on the CPU of several hosts, some of which have several"),
        ([CPU, CPU[:1]], "hierarchical", "the workers are on the CPU of several hosts, some of which have several"),
        ([CPU[:1], CPU[:1]], "gloo", "each worker is on the CPU of a host of its own"),
        ([OWN_GPUS], "nccl", "every worker has a GPU of its own"),
        ([OWN_GPUS, OWN_GPUS], "nccl", "every worker has a GPU of its own"),
        ([ONE_GPU], "gloo", "workers share a GPU, which NCCL refuses"),
        ([OWN_GPUS, CPU], "gloo", "some workers are on the CPU and some on a GPU"),
    ],
)
def test_the_fastest_backend_that_the_devices_allow_is_chosen(hosts: list[tuple[str, ...]], name: str, reason: str):
    choice = choose_backend(hosts)
    assert (choice.name, choice.reason) == (name, reason)
    assert choose_backend(hosts, "gloo").name == "gloo"


def test_a_machine_without_ordered_stores_uses_gloo_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory_support, "has_ordered_stores", lambda: False)
    for hosts in ([CPU], [CPU, CPU]):
        choice = choose_backend(hosts)
        assert choice.name == "gloo"
        assert "whose stores arrive in order" in choice.reason


def test_the_option_overrides_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANKLESS_BACKEND", raising=False)
    assert read_requested_backend(None) is None
    monkeypatch.setenv("RANKLESS_BACKEND", "gloo")
    assert read_requested_backend(None) == "gloo"
    assert read_requested_backend("nccl") == "nccl"
    monkeypatch.setenv("RANKLESS_BACKEND", "glo")
    with pytest.raises(ConfigError, match="RANKLESS_BACKEND=glo"):
        read_requested_backend(None)


@pytest.mark.parametrize(
    ("backend", "devices", "host_count", "found"),
    [
        ("nccl", CPU, 1, "workers on cpu, cpu"),
        ("nccl", ONE_GPU, 1, "workers on cuda:0, cuda:0"),
        ("shared_memory", OWN_GPUS, 1, "workers on cuda:0, cuda:1"),
        ("shared_memory", CPU, 2, "2 hosts"),
        ("hierarchical", CPU, 1, "one host"),
        ("hierarchical", OWN_GPUS, 2, "workers on cuda:0, cuda:1"),
    ],
)
def test_a_backend_that_cannot_connect_the_workers_is_refused(
    backend: backend_and_fault_tolerance.Backend, devices: tuple[str, ...], host_count: int, found: str
):
    with pytest.raises(ConfigError, match=found):
        backend_and_fault_tolerance.require_usable_backend(backend, devices, host_count=host_count)


def test_a_request_is_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make_run_config, "count_gpus", lambda: 0)
    monkeypatch.delenv("RANKLESS_BACKEND", raising=False)
    (tmp_path / "train.py").write_text("")
    program = Program(kind="script", target=str(tmp_path / "train.py"))
    assert make_run_config.make_run_config(program, RunRequest(worker_count=2)).backend is None
    assert make_run_config.make_run_config(program, RunRequest(worker_count=2, backend="gloo")).backend == "gloo"
    with pytest.raises(ConfigError, match="a GPU for each worker"):
        make_run_config.make_run_config(program, RunRequest(worker_count=2, backend="nccl"))


def test_memory_can_be_reserved_here_and_a_refusal_is_noticed(monkeypatch: pytest.MonkeyPatch):
    assert shared_memory_support.can_reserve(1 << 20)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    assert not shared_memory_support.can_reserve(1 << 20)


def test_no_more_memory_is_reserved_than_is_free(monkeypatch: pytest.MonkeyPatch):
    """The kernel would give an anonymous file more, and then end a process: any."""
    asked: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", lambda _descriptor, _start, count: asked.append(count))
    memory = available_cpu_and_memory.Memory(free=1 << 20, whole=1 << 30, is_limited=True)
    monkeypatch.setattr(shared_memory_support, "measure_memory", lambda: memory)
    assert shared_memory_support.can_reserve(1 << 20)
    assert not shared_memory_support.can_reserve((1 << 20) + 1)
    assert asked == [1 << 20]


def test_memory_is_what_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    machine = available_cpu_and_memory.measure_memory()
    assert 0 < machine.free <= machine.whole
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{24 << 20}\n")
    monkeypatch.setattr(available_cpu_and_memory, "list_control_group_folders", lambda _: [tmp_path])
    assert available_cpu_and_memory.measure_memory() == available_cpu_and_memory.Memory(
        40 << 20, 64 << 20, is_limited=True
    )
    # Files that have been read count as used, and are given up on demand. In a container they fill the limit.
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {16 << 20}\n")
    assert available_cpu_and_memory.measure_memory().free == 56 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert not available_cpu_and_memory.measure_memory().is_limited
