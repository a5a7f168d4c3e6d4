"""Ranks and sizes, init and shutdown, and the build functions."""

import importlib
import os

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from raised import raised


def check_ranks_are_a_permutation():
    """rank() is in 0 … size()-1, another on each process, and the launcher's variables say the same."""
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    assert (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) == (hvd.rank(), hvd.size())


def check_local_and_cross_ranks():
    """On one host the local rank is the rank, and the cross size is 1."""
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert mpi_ops.is_homogeneous()


def check_initialising_twice_does_nothing():
    """init() once more keeps everything."""
    before = hvd.rank()
    hvd.init()
    assert hvd.is_initialized()
    assert hvd.rank() == before


def check_shutdown_and_init_again():
    """init -> shutdown -> init works, any number of times; between them every call says what is missing."""
    for number in range(5):
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
            assert raised(ValueError, call) == "Horovod has not been initialized; use hvd.init()."
        raised(ValueError, lambda: hvd.allreduce(torch.ones(1)))
        hvd.init()
        assert hvd.allreduce(torch.tensor([number]), op=hvd.Sum).item() == number * hvd.size()


def check_a_communicator_of_ranks():
    """init(comm=[ranks]) makes a world of these ranks."""
    hvd.barrier()
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init(comm=[0, 1])
    if rank < 2:
        assert (hvd.rank(), hvd.size()) == (rank, 2)
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == 1
        hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)


def check_what_is_built():
    """Gloo is there and MPI is not, and says so."""
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
    assert isinstance(hvd.nccl_built(), int)
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert not hvd.rocm_built()
    expected = "Horovod MPI is not enabled; Please make sure it's installed and enabled."
    assert raised(ValueError, hvd.mpi_threads_supported) == expected


def check_modules_that_scripts_import():
    """Names are found where Horovod has them, and are the same objects there."""
    for module, names in {
        "horovod.torch.mpi_ops": ("allreduce", "synchronize", "rank", "Average", "ProcessSet"),
        "horovod.torch.optimizer": ("DistributedOptimizer",),
        "horovod.torch.compression": ("Compression",),
        "horovod.torch.functions": ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"),
        "horovod.torch.sync_batch_norm": ("SyncBatchNorm",),
        "horovod.common.process_sets": ("ProcessSet", "add_process_set", "global_process_set"),
        "horovod.common.exceptions": ("HorovodInternalError",),
    }.items():
        for name in names:
            assert getattr(importlib.import_module(module), name) is getattr(hvd, name), (module, name)
    util = importlib.import_module("horovod.common.util")
    assert (util.gloo_built(), util.mpi_built()) == (True, False)
    assert (util.extension_available("torch"), util.extension_available("mxnet")) == (True, False)
    with util.env(HOROVOD_OF_A_TEST="1"):
        assert os.environ["HOROVOD_OF_A_TEST"] == "1"
    assert "HOROVOD_OF_A_TEST" not in os.environ
    assert importlib.import_module("horovod").__version__ == "0.28.1"
    assert importlib.import_module("horovod").run is importlib.import_module("horovod.runner").run
    assert callable(importlib.import_module("horovod.runner.launch").run_commandline)
    states = importlib.import_module("horovod.torch.elastic.state")
    assert torch.nn.Module in [kind for kind, _ in states.get_handler_registry()]
    assert hvd.elastic.TorchState is states.TorchState
    interrupt = importlib.import_module("horovod.common.exceptions").HostsUpdatedInterrupt
    assert (interrupt().skip_sync, interrupt(True).skip_sync) == (False, True)


def check_constants():
    """The operations' numbers, and the exceptions' bases."""
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
