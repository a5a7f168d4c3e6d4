"""Processes of MPI's launchers join at MASTER_ADDR, or raise with the command to use. None trains alone."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import job_environment
from support.warm_process import WarmProcess

from rankless.config.mpi_variables import MpiWorker, mpi_worker

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_", "RANKLESS_", "OMPI_", "PMI")
SET_VARIABLES = f"""
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
    total = torch.tensor([rankless.rank() + 1.0])
    if rankless.world_size() > 1:
        torch.distributed.all_reduce(total)
    sys.stdout.write(f"{rankless.rank()} {rankless.world_size()} {rankless.local_rank()} {total.item()}\\n")
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
EXPECTED_ERROR = """\
expected: a launcher that sets the address at which the ranks rendezvous
found:    rank 1 of 2, and no MASTER_ADDR
fix:      start the job by `rankless horovodrun -np 2 …`, also instead of mpirun; or set MASTER_ADDR to an \
address of rank 0's host, and MASTER_PORT to a free port there; with RANK=0 WORLD_SIZE=1 a process trains alone"""


def open_mpi(rank: int, size: int = 2) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def mpich(rank: int, size: int = 2) -> dict[str, str]:
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: str(number) for name, number in numbers.items()}


def start(folder: Path, script: str, variables: dict[str, str], *arguments: str) -> WarmProcess:
    """Start a process with these variables, and without those of any other launcher."""
    path = folder / f"script{abs(hash(script))}.py"
    path.write_text(SET_VARIABLES + script)
    return WarmProcess(path, json.dumps(variables), *arguments)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def rendezvous_variables() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.parametrize(
    ("variables", "expected"),
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
def test_the_variables_of_mpi_are_read(variables: dict[str, str], expected: MpiWorker | None):
    assert mpi_worker(variables) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mpi"), [(TRAIN, open_mpi), (JOB, mpich), pytest.param(TRAIN, mpich, marks=pytest.mark.exhaustive)]
)
def test_ranks_with_an_address_join_repeatedly(script: str, mpi, tmp_path: Path):
    address = rendezvous_variables()
    done = [process.wait() for process in [start(tmp_path, script, {**mpi(rank), **address}) for rank in range(2)]]
    assert [each.stdout for each in done] == [f"{rank} 2 {rank} 3.0\n" * 2 for rank in range(2)], done


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, JOB])
def test_a_rank_without_an_address_raises_instead_of_training_alone(script: str, tmp_path: Path):
    done = start(tmp_path, script, open_mpi(1)).wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert EXPECTED_ERROR in done.stderr


@pytest.mark.slow
def test_an_address_without_a_port_raises(tmp_path: Path):
    done = start(tmp_path, TRAIN, {**open_mpi(1), "MASTER_ADDR": "127.0.0.1"}).wait()
    assert done.returncode == 1
    assert "found:    rank 1 of 2, and no MASTER_PORT" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, pytest.param(JOB, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("variables", [open_mpi(0, 1), {**open_mpi(1), "RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_is_a_job_of_one_and_torchruns_variables_take_precedence(
    script: str, variables: dict[str, str], tmp_path: Path
):
    done = start(tmp_path, script, variables).wait()
    assert done.stdout == "0 1 0 1.0\n" * 2, done.stderr


@pytest.mark.slow
def test_a_process_group_of_the_script_is_used(tmp_path: Path):
    address = f"tcp://127.0.0.1:{free_port()}"
    done = [each.wait() for each in [start(tmp_path, OWN_GROUP, open_mpi(rank), address) for rank in range(2)]]
    assert [each.stdout for each in done] == ["0 2\n", "1 2\n"], done


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", pytest.param("mpirun.mpich", marks=pytest.mark.exhaustive)])
def test_scripts_under_the_real_launchers_join(mpirun: str, tmp_path: Path):
    """Uses the launchers under the names that Debian gives them."""
    if shutil.which(mpirun) is None:
        pytest.skip(f"there is no {mpirun}")
    (tmp_path / "train.py").write_text("import sys\n" + TRAIN)
    environment = job_environment({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [mpirun, "-np", "2", sys.executable, "train.py"]
        variables = {**environment, **more, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)

    failed = run()
    assert failed.returncode != 0
    assert "start the job by `rankless horovodrun -np 2 …`" in failed.stderr
    joined = run(**rendezvous_variables())
    assert sorted(joined.stdout.splitlines()) == sorted(f"{rank} 2 {rank} 3.0" for rank in (0, 1) for _ in range(2)), (
        joined
    )
