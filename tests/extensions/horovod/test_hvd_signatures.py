"""The parameters of functions have the names, order and defaults of Horovod 0.28.1."""

import inspect
from typing import Any

import pytest

import rankless.extensions.horovod as horovod
import rankless.extensions.horovod.torch as hvd
from rankless.extensions.horovod.common.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt
from rankless.extensions.horovod.torch import elastic, optimizer
from rankless.extensions.horovod.torch.elastic import state
from rankless.extensions.horovod.torch.elastic.state import TorchState

REDUCTION = "op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global"
IN_PLACE_OR_LATER = f"average=None, name=None, {REDUCTION}"
AT_ONCE = f"average=None, name=None, compression=none, {REDUCTION}"
SCATTERED = "op=Average, process_set=global, prescale_factor=1.0, postscale_factor=1.0"
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "allreduce": f"tensor, {AT_ONCE}",
    "allreduce_": f"tensor, {IN_PLACE_OR_LATER}",
    "allreduce_async": f"tensor, {IN_PLACE_OR_LATER}",
    "allreduce_async_": f"tensor, {IN_PLACE_OR_LATER}",
    "grouped_allreduce": f"tensors, {AT_ONCE}",
    "grouped_allreduce_": f"tensors, {IN_PLACE_OR_LATER}",
    "grouped_allreduce_async": f"tensors, {IN_PLACE_OR_LATER}",
    "grouped_allreduce_async_": f"tensors, {IN_PLACE_OR_LATER}",
    "sparse_allreduce_async": "tensor, name, op, process_set=global",
    "allgather": "tensor, name=None, process_set=global",
    "allgather_async": "tensor, name=None, process_set=global",
    "grouped_allgather": "tensors, name=None, process_set=global",
    "grouped_allgather_async": "tensors, name=None, process_set=global",
    "broadcast": "tensor, root_rank, name=None, process_set=global",
    "broadcast_": "tensor, root_rank, name=None, process_set=global",
    "broadcast_async": "tensor, root_rank, name=None, process_set=global",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=global",
    "alltoall": "tensor, splits=None, name=None, process_set=global",
    "alltoall_async": "tensor, splits=None, name=None, process_set=global",
    "reducescatter": f"tensor, name=None, compression=none, {SCATTERED}",
    "reducescatter_async": f"tensor, name=None, {SCATTERED}",
    "grouped_reducescatter": f"tensors, name=None, compression=none, {SCATTERED}",
    "grouped_reducescatter_async": f"tensors, name=None, {SCATTERED}",
    "join": "device=-1",
    "barrier": "process_set=global",
    "poll": "handle",
    "synchronize": "handle",
    # Two take a process set here, too, as their last parameter: this one, and broadcast_parameters.
    "allgather_object": "obj, name=None, process_set=global",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=global",
    "broadcast_parameters": "params, root_rank, process_set=global",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    **dict.fromkeys(("is_initialized", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"), ""),
    **dict.fromkeys(("mpi_threads_supported", "mpi_enabled", "gloo_enabled"), ""),
}
WITHOUT = {
    *("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "HorovodInternalError", "elastic"),
    *("ProcessSet", "global_process_set", "DistributedSampler"),
    *("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
}
"""Names that are no functions, or are called without arguments in Horovod and take a switch here."""


def written(function: Any) -> str:
    """A signature as Horovod's documentation has it."""

    def default(value: Any) -> str:
        names = {id(hvd.global_process_set): "global", id(hvd.Compression.none): "none", id(hvd.Average): "Average"}
        return names.get(id(value), repr(value))

    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        one.name if one.default is one.empty else f"{one.name}={default(one.default)}" for one in parameters
    )


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_has_horovods_parameters(name: str):
    assert written(getattr(hvd, name)) == SIGNATURES[name]


def test_no_public_function_is_left_out():
    assert set(SIGNATURES) | WITHOUT == set(hvd.__all__)


def test_all_build_functions_work_without_arguments():
    for name in sorted(one for one in WITHOUT if one.endswith("_built")):
        assert all(one.default is not one.empty for one in inspect.signature(getattr(hvd, name)).parameters.values())


def test_methods_and_elastic_classes_have_horovods_parameters():
    assert written(elastic.run) == "func"
    assert written(elastic.ElasticSampler) == "dataset, shuffle=True, seed=0"
    assert written(elastic.ElasticSampler.record_batch) == "self, batch_idx, batch_size"
    assert written(TorchState) == "model=None, optimizer=None, kwargs"
    assert written(state.set_handler_registry) == "registry"
    assert written(state.get_handler_registry) == ""
    assert written(hvd.ProcessSet) == "ranks_or_comm"
    for name in ("commit", "check_host_updates", "save", "restore", "sync", "on_reset"):
        assert written(getattr(TorchState, name)) == "self"
    assert written(TorchState.register_reset_callbacks) == "self, callbacks"
    assert (
        written(optimizer.AllreduceOptimizer.synchronize)
        == written(optimizer.AllreduceOptimizer.skip_synchronize)
        == "self"
    )
    assert written(optimizer.AllreduceOptimizer.set_backward_passes_per_step) == "self, passes"
    assert written(optimizer.AllreduceOptimizer.step) == "self, closure=None"


def test_horovod_run_has_the_keywords_of_the_original():
    assert written(horovod.run) == (
        "func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None, "
        "cooldown_range=None, hosts=None, hostfile=None, start_timeout=None, ssh_port=None, ssh_identity_file=None, "
        "disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None, "
        "network_interface=None, executable=None, np=None, min_np=None, max_np=None"
    )


def test_exceptions_have_horovods_base_classes():
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert HostsUpdatedInterrupt().skip_sync is False
    assert issubclass(HorovodVersionMismatchError, ImportError)
    mismatch = HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.1", "2.0")


def test_a_division_before_the_sum_is_rejected_on_rocm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizer, "rocm_built", lambda: True)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported yet with ROCm"):
        hvd.DistributedOptimizer(None, gradient_predivide_factor=2.0)  # type: ignore[arg-type]
