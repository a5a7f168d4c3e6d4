"""Processes that MPI's launchers have started: they join at MASTER_ADDR, or say how to start; none trains alone."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import environment_of_jobs
from support.warm_process import Preloaded

from rankless.config.mpi_variables import MpiWorker, mpi_worker

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_", "RANKLESS_", "OMPI_", "PMI")
TOLD = f"""
import json, os, sys
for name in list(os.environ):
    if name.startswith({LAUNCHERS}):
        del os.environ[name]
os.environ.update(json.loads(sys.argv[1]))
"""
TRAIN = """
import torch
import rankless.compat.horovod.torch as hvd

for _ in range(2):
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    sys.stdout.write(f"{hvd.rank()} {hvd.size()} {hvd.local_rank()} {total.item()}\\n")
    hvd.shutdown()
"""
JOB = """
import rankless, torch.distributed
for _ in range(2):
    rankless.init()
    told = torch.tensor([rankless.rank() + 1.0])
    if rankless.world_size() > 1:
        torch.distributed.all_reduce(told)
    sys.stdout.write(f"{rankless.rank()} {rankless.world_size()} {rankless.local_rank()} {told.item()}\\n")
    rankless.shutdown()
"""
OWN_GROUP = """
import torch.distributed as dist
import rankless.compat.horovod.torch as hvd
dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(os.environ["OMPI_COMM_WORLD_RANK"]), world_size=2)
hvd.init()
print(hvd.rank(), hvd.size())
hvd.shutdown()
"""
REFUSED = """\
expected: a launcher that tells where the ranks meet
found:    rank 1 of 2, and no MASTER_ADDR
fix:      start the job by `rankless horovodrun -np 2 …`, also in the place of mpirun; or set MASTER_ADDR to an \
address of rank 0's host, and MASTER_PORT to a free port there; RANK=0 WORLD_SIZE=1 let a process train alone"""


def open_mpi(rank: int, size: int = 2) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def mpich(rank: int, size: int = 2) -> dict[str, str]:
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: str(number) for name, number in numbers.items()}


def start(folder: Path, script: str, variables: dict[str, str], *arguments: str) -> Preloaded:
    """A process with these variables, and without those of any other launcher."""
    path = folder / f"script{abs(hash(script))}.py"
    path.write_text(TOLD + script)
    return Preloaded(path, json.dumps(variables), *arguments)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def meeting_place() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (open_mpi(2, 4), MpiWorker(rank=2, world_size=4, local_rank=2)),
        (mpich(1), MpiWorker(rank=1, world_size=2, local_rank=1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, MpiWorker(rank=5, world_size=8, local_rank=0)),
        ({**mpich(0, 2), **open_mpi(3, 4)}, MpiWorker(rank=3, world_size=4, local_rank=3)),
        (open_mpi(0, 1), None),
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, None),
        ({"PMI_RANK": "-1", "PMI_SIZE": "4"}, None),
    ],
)
def test_what_mpi_tells(variables: dict[str, str], told: MpiWorker | None):
    assert mpi_worker(variables) == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mpi"), [(TRAIN, open_mpi), (JOB, mpich), pytest.param(TRAIN, mpich, marks=pytest.mark.exhaustive)]
)
def test_with_an_address_the_ranks_join_any_number_of_times(script: str, mpi, tmp_path: Path):
    place = meeting_place()
    done = [process.ended() for process in [start(tmp_path, script, {**mpi(rank), **place}) for rank in range(2)]]
    assert [each.stdout for each in done] == [f"{rank} 2 {rank} 3.0\n" * 2 for rank in range(2)], done


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, JOB])
def test_without_one_a_rank_says_how_to_start_instead_of_training_alone(script: str, tmp_path: Path):
    done = start(tmp_path, script, open_mpi(1)).ended()
    assert (done.returncode, done.stdout) == (1, "")
    assert REFUSED in done.stderr


@pytest.mark.slow
def test_an_address_without_a_port_is_refused_too(tmp_path: Path):
    done = start(tmp_path, TRAIN, {**open_mpi(1), "MASTER_ADDR": "127.0.0.1"}).ended()
    assert done.returncode == 1
    assert "found:    rank 1 of 2, and no MASTER_PORT" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, pytest.param(JOB, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("variables", [open_mpi(0, 1), {**open_mpi(1), "RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_is_alone_and_torchruns_variables_come_first(
    script: str, variables: dict[str, str], tmp_path: Path
):
    done = start(tmp_path, script, variables).ended()
    assert done.stdout == "0 1 0 1.0\n" * 2, done.stderr


@pytest.mark.slow
def test_a_group_that_the_script_has_made_is_taken(tmp_path: Path):
    address = f"tcp://127.0.0.1:{free_port()}"
    done = [each.ended() for each in [start(tmp_path, OWN_GROUP, open_mpi(rank), address) for rank in range(2)]]
    assert [each.stdout for each in done] == ["0 2\n", "1 2\n"], done


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", pytest.param("mpirun.mpich", marks=pytest.mark.exhaustive)])
def test_the_real_launchers(mpirun: str, tmp_path: Path):
    """By the names that Debian gives them."""
    if shutil.which(mpirun) is None:
        pytest.skip(f"there is no {mpirun}")
    (tmp_path / "train.py").write_text("import sys\n" + TRAIN)
    environment = environment_of_jobs({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

    def ran(**more: str) -> subprocess.CompletedProcess[str]:
        command = [mpirun, "-np", "2", sys.executable, "train.py"]
        told = {**environment, **more, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=120)

    refused = ran()
    assert refused.returncode != 0
    assert "start the job by `rankless horovodrun -np 2 …`" in refused.stderr
    joined = ran(**meeting_place())
    assert sorted(joined.stdout.splitlines()) == sorted(f"{rank} 2 {rank} 3.0" for rank in (0, 1) for _ in range(2)), (
        joined
    )
