"""The modules and names besides the API that scripts, tools and Horovod's own tests import, and that they work."""

import importlib
import threading
import time

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks

from rankless.extensions.horovod.common import elastic, util
from rankless.extensions.horovod.common.basics import HorovodBasics
from rankless.extensions.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from rankless.extensions.horovod.runner.common.util import (
    codec,
    env,
    host_hash,
    hosts,
    secret,
    timeout,
    tiny_shell_exec,
)
from rankless.extensions.horovod.runner.elastic import discovery, worker
from rankless.extensions.horovod.runner.util import threads

MODULES = {
    "common.basics": ("HorovodBasics",),
    "common.elastic": ("State", "ObjectState", "run_fn", "notification_manager"),
    "common.exceptions": ("HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"),
    "common.process_sets": ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    "common.util": ("_cache", "check_extension", "check_installed_version", "get_ext_suffix", "nccl_built"),
    "data": ("AsyncDataLoaderMixin", "BaseDataLoader"),
    "data.data_loader_base": ("AsyncDataLoaderMixin", "BaseDataLoader"),
    "runner": ("run",),
    "runner.launch": ("run_commandline",),
    "runner.common.util.codec": ("dumps_base64", "loads_base64"),
    "runner.common.util.env": ("is_exportable", "get_env_rank_and_size"),
    "runner.common.util.host_hash": ("host_hash",),
    "runner.common.util.hosts": ("HostInfo", "SlotInfo", "get_host_assignments", "parse_hosts", "parse_host_files"),
    "runner.common.util.secret": ("make_secret_key", "compute_digest", "check_digest", "HOROVOD_SECRET_KEY"),
    "runner.common.util.timeout": ("Timeout", "TimeoutException"),
    "runner.common.util.tiny_shell_exec": ("execute",),
    "runner.elastic.discovery": ("HostDiscovery", "HostDiscoveryScript", "FixedHosts"),
    "runner.elastic.worker": ("HostUpdateResult", "WorkerNotificationManager"),
    "runner.util.threads": ("in_thread", "on_event", "execute_function_multithreaded"),
    "torch.elastic.sampler": ("ElasticSampler",),
    "torch.elastic.state": ("TorchState", "StateHandler", "ModelStateHandler", "OptimizerStateHandler"),
    "torch.mpi_lib_v2": ("horovod_torch_poll", "horovod_torch_wait_and_clear", "horovod_torch_reset"),
    "torch.mpi_ops": ("HorovodAllreduce", "HorovodAllgather", "HorovodBroadcast", "HorovodAlltoall", "_basics"),
    "torch.optimizer": ("_DistributedOptimizer", "_DistributedAdasumOptimizer", "DistributedOptimizer"),
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_scripts_import_have_their_names(module: str):
    found = importlib.import_module(f"rankless.extensions.horovod.{module}")
    assert [name for name in MODULES[module] if not hasattr(found, name)] == []


def attributes(hvd):
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=2)
    delays = [list(optimizer._allreduce_delay.values())]
    handles = []
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        delays.append(list(optimizer._allreduce_delay.values()))
        handles.append({optimizer._parameter_names[parameter] for parameter in optimizer._handles})
    submitted = all(isinstance(handle, int) for handle, _ in optimizer._handles.values())
    optimizer.synchronize()
    before = optimizer._synchronized
    with optimizer.skip_synchronize():
        skips = optimizer._should_synchronize
        optimizer.step()
    assert optimizer._requires_update == set(model.parameters())
    assert set(optimizer._parameter_names.values()) == {"weight", "bias"}
    optimizer.backward_passes_per_step = 3
    return (
        delays,
        handles,
        submitted,
        (before, optimizer._synchronized, skips, optimizer._should_synchronize, optimizer._handles),
        (optimizer.op, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense, optimizer._compression.__name__),
        optimizer._allreduce_delay[model.weight],
        optimizer.find_duplicates("abca"),
    )


def test_an_optimizer_has_the_attributes_that_tools_read():
    names = {"weight", "bias"}
    expected = (
        [[2, 2], [1, 1], [0, 0]],
        [set(), names],
        True,
        (True, False, False, True, {}),
        (0, 1.0, False, "NoneCompressor"),
        3,
        {"a"},
    )
    assert on_ranks(2, attributes) == [expected] * 2


def zeros(hvd):
    found = []
    for kind in (torch.optim.SGD, torch.optim.Adam):
        model = torch.nn.Linear(2, 1)
        model.bias.grad = torch.ones(1)
        hvd.broadcast_optimizer_state(kind(model.parameters(), lr=0.1), root_rank=0)
        found.append([parameter.grad.tolist() for parameter in model.parameters()])
    return found


def test_gradients_are_zeros_after_the_broadcast_of_an_empty_optimizer_state():
    assert on_ranks(2, zeros) == [[[[[0.0, 0.0]], [1.0]]] * 2] * 2


def applied(hvd):
    mpi_ops = importlib.import_module("rankless.extensions.horovod.torch.mpi_ops")
    everyone = hvd.global_process_set
    given = torch.full((2,), hvd.rank() + 1.0, requires_grad=True)
    results = [
        mpi_ops.HorovodAllreduce.apply(given, None, "a", hvd.Sum, 2.0, 1.0, everyone),
        mpi_ops.HorovodGroupedAllreduce.apply(None, "g", hvd.Average, 1.0, 1.0, everyone, given)[0],
        mpi_ops.HorovodReducescatter.apply(given, "r", hvd.Sum, everyone, 1.0, 1.0),
        mpi_ops.HorovodGroupedReducescatter.apply("s", hvd.Sum, everyone, 1.0, 1.0, given)[0],
        mpi_ops.HorovodAllgather.apply(given, "w", everyone),
        mpi_ops.HorovodBroadcast.apply(given, 1, "b", everyone),
        mpi_ops.HorovodAlltoall.apply(given, None, "t", everyone)[0],
    ]
    sum(result.sum() for result in results).backward()
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    waited = mpi_ops.mpi_lib.horovod_torch_wait_and_clear(handle).item()
    basics = HorovodBasics(__file__, "mpi_lib_v2")
    assert (mpi_ops._basics.size(), basics.rank(), basics.gloo_built()) == (hvd.size(), hvd.rank(), True)
    return [result.tolist() for result in results], given.grad is not None, waited


def test_autograd_functions_and_the_compiled_modules_functions_take_horovods_arguments():
    for found, has_gradient, waited in on_ranks(2, applied):
        assert found == [[6.0, 6.0], [1.5, 1.5], [3.0], [3.0], [1.0, 1.0, 2.0, 2.0], [2.0, 2.0], [1.0, 2.0]]
        assert has_gradient
        assert waited == 2.0


class Loader(BaseDataLoader):
    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            yield number

    def _process_batch(self, batch):
        return 10 * batch


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_loader_reads_ahead_in_a_thread_epoch_by_epoch(size: int):
    loader = AsyncLoader(size, 3)
    assert [list(loader), list(loader)] == [[0, 10, 20]] * 2 == [list(Loader(3))] * 2
    assert loader.thread.is_alive() == (size > 0)
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_a_loader_that_fails_raises_in_the_loop_and_one_that_is_closed_ends():
    loader = AsyncLoader(2, 3, fails_at=1)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert list(loader) == []
    loader = AsyncLoader(2, 100)
    batches = iter(loader)
    next(batches)
    loader.close_async_loader()
    assert len(list(batches)) < 100


def test_hosts_and_slots_become_ranks(tmp_path):
    infos = hosts.parse_hosts("a:2,[::1]:1")
    assert infos == [hosts.HostInfo("a", 2), hosts.HostInfo("::1", 1)]
    slots = hosts.get_host_assignments(infos, 2, 3)
    assert [(one.hostname, one.rank, one.local_rank, one.cross_rank) for one in slots] == [
        ("a", 0, 0, 0),
        ("a", 1, 1, 0),
        ("::1", 2, 0, 1),
    ]
    assert [one.to_response_string() for one in slots] == ["0,3,0,2,0,2", "1,3,1,2,0,1", "2,3,0,1,1,2"]
    assert error_of(lambda: hosts.get_host_assignments(infos, 4))[0] == "ValueError"
    assert error_of(lambda: hosts.parse_hosts("a"))[0] == "ValueError"
    (tmp_path / "hosts").write_text("# mine\na slots=2\nb\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "a:2,b:1"
    assert hosts.parse_hosts_and_slots("a:2,b:1") == (["a", "b"], {"a": 2, "b": 1})


def test_keys_codecs_limits_and_commands(monkeypatch):
    key = secret.make_secret_key()
    assert secret.check_digest(key, b"text", secret.compute_digest(key, b"text"))
    assert not secret.check_digest(key, b"other", secret.compute_digest(key, b"text"))
    for to_ascii in (True, False):
        assert codec.loads_base64(codec.dumps_base64({"f": len}, to_ascii=to_ascii))["f"]("abc") == 3
    assert host_hash.host_hash() == host_hash.host_hash()
    assert host_hash.host_hash("salt") != host_hash.host_hash()
    limit = timeout.Timeout(100, "Too slow to {activity}.")
    limit.check_time_out_for("start")
    assert 90 < limit.remaining() <= 100
    monkeypatch.setattr(time, "time", lambda: limit.timed_out_at() + 1)
    assert error_of(lambda: limit.check_time_out_for("start")) == (
        "TimeoutException",
        "Too slow to start. Timeout after 100 seconds.",
    )
    assert tiny_shell_exec.execute("echo out; echo $OF_A_TEST >&2; exit 3", {"OF_A_TEST": "1"}) == ("out\n1\n", 3)


def test_variables_and_ranks_of_the_environment(monkeypatch):
    names = ("PATH", "HOROVOD_RANK", "OLDPWD", "BASH_FUNC_module%%", "BASH_FUNC_x()", "a b")
    assert [name for name in names if env.is_exportable(name)] == ["PATH", "HOROVOD_RANK"]
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "RANKLESS_WORKER_PLAN"):
        monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert env.get_env_rank_and_size() == (1, 4)
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    assert env.get_env_rank_and_size() == (2, 3)


def test_discovery_and_notifications(tmp_path):
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho a:2\necho b\n")
    script.chmod(0o755)
    assert discovery.HostDiscoveryScript(str(script), 3).find_available_hosts_and_slots() == {"a": 2, "b": 3}
    assert error_of(discovery.HostDiscoveryScript(str(script), None).find_available_hosts_and_slots)[0] == "ValueError"
    assert error_of(discovery.HostDiscoveryScript("exit 1", 1).find_available_hosts_and_slots)[0] == "RuntimeError"
    fixed = discovery.FixedHosts({"a": 1})
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}
    state = elastic.ObjectState(lambda value: value, lambda: 0, batch=0)
    elastic.notification_manager.register_listener(state)
    elastic.notification_manager.handle_hosts_updated(1, worker.HostUpdateResult.added)
    assert error_of(state.check_host_updates)[0] == "HostsUpdatedInterrupt"
    elastic.notification_manager.remove_listener(state)
    elastic.notification_manager.handle_hosts_updated(2, worker.HostUpdateResult.added)
    state.check_host_updates()


def test_threads_call_functions():
    results = threads.execute_function_multithreaded(lambda a, b: a + b, [(1, 2), (3, 4)], max_concurrent_executions=1)
    assert results == {0: 3, 1: 7}
    event, stop, called = threading.Event(), threading.Event(), []
    stopped = threads.on_event(threading.Event(), called.append, ("never",), stop, check_stop_interval_s=0.01)
    waiting = threads.on_event(event, called.append, ("once",))
    stop.set()
    event.set()
    for thread in (stopped, waiting):
        thread.join(10)
        assert not thread.is_alive()
    assert called == ["once"]
    assert error_of(lambda: threads.in_thread(print, ["no tuple"]))[0] == "ValueError"


def test_utilities_of_versions_and_caches():
    calls = []
    cached = util._cache(lambda number: calls.append(number) or number)
    assert [cached(1), cached(1), cached(2), calls] == [1, 1, 2, [1, 2]]
    util.check_installed_version("pytorch", torch.__version__)
    assert error_of(lambda: util.check_installed_version("pytorch", "0.1"))[0] == "HorovodVersionMismatchError"
    assert util.is_version_greater_equal_than("2.10.0+cpu", "2.9.1")
    assert not util.is_version_greater_equal_than("2.8.9", "2.9.1")
    assert error_of(lambda: util.is_version_greater_equal_than("2.8.9", "2.9"))[0] == "ValueError"
    assert util.get_ext_suffix().endswith(".so")
