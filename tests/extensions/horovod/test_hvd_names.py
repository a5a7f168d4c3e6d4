"""The names that scripts import, the modules they import them from, and the build functions."""

import importlib
import os

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks

import rankless.extensions.horovod.torch as hvd
from rankless.extensions.horovod.common import util
from rankless.extensions.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from rankless.extensions.horovod.torch import compression, functions, mpi_ops, optimizer

PUBLIC = {
    "elastic",
    "init",
    "shutdown",
    "is_initialized",
    "size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "allreduce",
    "allreduce_async",
    "allreduce_",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_allreduce_",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "broadcast",
    "broadcast_async",
    "broadcast_",
    "broadcast_async_",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "barrier",
    "poll",
    "synchronize",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "ProcessSet",
    "global_process_set",
    "add_process_set",
    "remove_process_set",
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "HorovodInternalError",
    "DistributedSampler",
}


def test_the_public_names_are_those_of_horovod():
    assert set(hvd.__all__) == PUBLIC
    assert all(hasattr(hvd, name) for name in PUBLIC)
    assert not hasattr(hvd, "is_homogeneous")
    assert all(hasattr(mpi_ops, name) for name in mpi_ops.__all__)
    assert callable(mpi_ops.is_homogeneous)


def test_scripts_find_names_in_horovods_modules():
    assert functions.broadcast_parameters is hvd.broadcast_parameters
    assert optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert compression.Compression is hvd.Compression
    assert issubclass(HorovodInternalError, RuntimeError)
    assert HostsUpdatedInterrupt(True).skip_sync


WITHOUT_COUNTERPART = [
    *("metadata", "runner.gloo_run", "runner.mpi_run", "runner.http.http_server", "runner.util.network"),
    *("runner.elastic.driver", "runner.elastic.rendezvous"),
]


@pytest.mark.parametrize("module", WITHOUT_COUNTERPART)
def test_modules_without_a_counterpart_say_at_a_call_what_to_use(module: str):
    found = importlib.import_module(f"rankless.extensions.horovod.{module}")
    with pytest.raises(NotImplementedError, match=rf"horovod\.{module}\.anything has no counterpart .* Use .*horovod"):
        found.anything(1, two=2)
    assert not hasattr(found, "__path__")


def tools_methods(hvd):
    torch.manual_seed(0)
    model, later = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    names = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), names, groups=[[model.weight]])
    found = [len(optimizer._grad_accs), [len(group) for group in optimizer._groups]]
    optimizer.add_param_group({"params": list(later.parameters())})
    optimizer._register_hooks()
    found.append(len(optimizer._requires_update))
    inputs = torch.full((1, 2), float(hvd.rank()))
    (model(inputs) + later(inputs)).sum().backward()
    optimizer.synchronize()
    found.append(later.weight.grad.tolist())
    later.weight.grad = torch.full((1, 2), 4.0 * hvd.rank())
    handle, _ = optimizer._allreduce_grad_async(later.weight)
    hvd.synchronize(handle)
    found.append(later.weight.grad.tolist())
    optimizer.backward_passes_per_step = 3
    optimizer._make_hook(later.bias)(None)
    return [*found, optimizer._allreduce_delay[later.bias]]


def test_tools_find_the_optimizers_methods_under_horovods_names():
    assert on_ranks(2, tools_methods) == [[2, [1], 4, [[0.5, 0.5]], [[2.0, 2.0]], 2]] * 2


def test_reductions_have_horovods_numbers():
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]


def test_the_build_functions_report_what_pytorch_provides():
    assert hvd.gloo_built() is hvd.gloo_enabled() is True
    assert [hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()] == [False] * 4
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert isinstance(hvd.nccl_built(), int)
    assert (hvd.nccl_built() > 0) == torch.distributed.is_nccl_available()


def test_the_supported_frameworks_are_reported():
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow", verbose=True)
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    assert error_of(lambda: util.check_extension("horovod.mxnet", "", __file__))[0] == "ImportError"


def test_environment_variables_are_set_for_a_block(monkeypatch):
    monkeypatch.setenv("RANKLESS_TEST_KEPT", "old")
    with util.env(RANKLESS_TEST_KEPT="new", RANKLESS_TEST_ADDED="1", RANKLESS_TEST_LEFT=None):
        assert os.environ["RANKLESS_TEST_KEPT"] == "new"
        assert os.environ["RANKLESS_TEST_ADDED"] == "1"
    assert os.environ["RANKLESS_TEST_KEPT"] == "old"
    assert "RANKLESS_TEST_ADDED" not in os.environ


def test_lists_are_split_evenly_and_powers_of_two_recognized():
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 3) == [[1], [], []]
    assert [number for number in range(10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.is_iterable([])
    assert not util.is_iterable(3)


def sampled(hvd):
    sampler = hvd.DistributedSampler(range(7), shuffle=True, seed=3)
    torchs = torch.utils.data.distributed.DistributedSampler(
        range(7), num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True, seed=3
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(sampler) == list(torchs)
    assert len(hvd.DistributedSampler(range(7), drop_last=True)) == 3
    return len(sampler), mpi_ops.is_homogeneous()


def test_its_sampler_is_torchs_with_horovods_ranks():
    assert on_ranks(2, sampled) == [(4, True)] * 2


def positions(hvd):
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def test_ranks_of_one_host():
    assert on_ranks(2, positions) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def again(hvd):
    seen = []
    for _ in range(5):
        hvd.init()
        seen.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        hvd.shutdown()
        hvd.shutdown()
        seen.append(hvd.is_initialized())
        hvd.init()
    return seen


def test_init_and_shutdown_any_number_of_times():
    assert on_ranks(2, again) == [[2.0, False] * 5] * 2
