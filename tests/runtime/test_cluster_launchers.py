"""Processes of mpirun, srun and Kubernetes join, or raise with what to set or to type. None trains alone."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import job_environment
from support.warm_process import WarmProcess

from rankless.config.cluster_variables import FIRST_PORT, ClusterWorker, expand_first_host, read_cluster_worker

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_", "RANKLESS_", "OMPI_", "PMI")
LAUNCHERS += ("SLURM_", "JOB_COMPLETION_INDEX")
SET_VARIABLES = f"""
import json, os, sys
for name in list(os.environ):
    if name.startswith({LAUNCHERS}):
        del os.environ[name]
os.environ.update(json.loads(sys.argv[1]))
"""
TRAIN = """
import torch
import rankless.extensions.horovod.torch as hvd

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
MODEL = """
import torch, rankless
model = torch.nn.Linear(2, 1)
train = rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(lambda x: model(x).mean())
train(torch.ones(4, 2))
sys.stdout.write(f"loss {rankless.world_size()}\\n")
"""
LOADER = """
import torch, rankless
for _ in rankless.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2):
    sys.stdout.write("batch\\n")
"""
OWN_GROUP = """
import torch.distributed as dist
import rankless.extensions.horovod.torch as hvd
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


def srun(rank: int, size: int = 2) -> dict[str, str]:
    """Return the variables of a task of `srun` on the first of two hosts."""
    numbers = {"PROCID": rank, "NTASKS": size, "NPROCS": size, "STEP_NUM_TASKS": size, "LOCALID": rank, "NODEID": 0}
    places = {"JOB_ID": 12345, "STEP_ID": 2, "STEP_NUM_NODES": 1, "STEP_NODELIST": "node[03-04]", "JOB_NUM_NODES": 2}
    return {f"SLURM_{name}": str(value) for name, value in {**numbers, **places}.items()}


def pod(index: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(index), "WORLD_SIZE": "2"}


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


SRUN_1 = ClusterWorker(
    launcher="srun", rank=1, world_size=2, local_rank=1, address="127.0.0.1", port=FIRST_PORT + (12345 * 7 + 2) % 20_000
)


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
        (open_mpi(2, 4), ClusterWorker(launcher="mpirun", rank=2, world_size=4, local_rank=2)),
        (mpich(1), ClusterWorker(launcher="mpirun", rank=1, world_size=2, local_rank=1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, ClusterWorker(launcher="mpirun", rank=5, world_size=8)),
        ({**mpich(0, 2), **open_mpi(3, 4)}, ClusterWorker(launcher="mpirun", rank=3, world_size=4, local_rank=3)),
        (srun(1), SRUN_1),
        (without(srun(1), "SLURM_STEP_NUM_TASKS"), SRUN_1),
        ({**srun(1), **mpich(1)}, SRUN_1),  # srun --mpi=pmi2
        ({**srun(1), **open_mpi(3, 4)}, ClusterWorker(launcher="mpirun", rank=3, world_size=4, local_rank=3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, None),  # a batch script
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, ClusterWorker(launcher="srun", rank=1, world_size=4)),
        (srun(0, 1), None),
        (pod(1), ClusterWorker(launcher="Kubernetes", rank=1, world_size=2)),
        (without(pod(1), "WORLD_SIZE"), ClusterWorker(launcher="Kubernetes", rank=1, world_size=0)),
        ({**pod(5), "WORLD_SIZE": "2"}, ClusterWorker(launcher="Kubernetes", rank=5, world_size=0)),
        ({**pod(0), "WORLD_SIZE": "1"}, None),
        (open_mpi(0, 1), None),
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, None),
        ({"PMI_RANK": "-1", "PMI_SIZE": "4"}, None),
    ],
)
def test_the_variables_of_clusters_are_read(variables: dict[str, str], expected: ClusterWorker | None):
    assert read_cluster_worker(variables) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[03,07-09]", "node03"),
        ("gpu-a[01-02]-r[5,6],login", "gpu-a01-r5"),
        ("rack[1-2]n[001-004].site.org", "rack1n001.site.org"),
        ("10.0.0.1", "10.0.0.1"),
        ("", None),
    ],
)
def test_the_first_host_of_slurms_lists_is_found(nodes: str, first: str | None):
    assert expand_first_host(nodes) == first
    step = without(without({**srun(0), "SLURM_STEP_NODELIST": nodes}, "SLURM_STEP_NUM_NODES"), "SLURM_JOB_ID")
    found = read_cluster_worker(step)
    assert found is not None
    assert found.address == ("127.0.0.1" if first == nodes else first)
    assert found.port == 0


def test_steps_and_jobs_have_ports_of_their_own():
    def port(**changes: str) -> int:
        found = read_cluster_worker({**srun(0), **changes})
        assert found is not None
        return found.port

    ports = [port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(100, 110) for step in range(5)]
    assert len(set(ports)) == 50
    assert all(FIRST_PORT <= each < 30_000 for each in ports)


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("script", [JOB, MODEL, pytest.param(TRAIN, marks=pytest.mark.exhaustive)])
def test_tasks_of_srun_join_without_an_address(script: str, tmp_path: Path):
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(len(script))}
    done = [process.wait() for process in [start(tmp_path, script, {**srun(rank), **job}) for rank in range(2)]]
    wanted = "loss 2\n" if script is MODEL else None
    assert [each.stdout for each in done] == [wanted or f"{rank} 2 {rank} 3.0\n" * 2 for rank in range(2)], done


@pytest.mark.slow
@pytest.mark.parametrize("script", [MODEL, pytest.param(JOB, marks=pytest.mark.exhaustive)])
def test_pods_of_an_indexed_job_join(script: str, tmp_path: Path):
    address = rendezvous_variables()
    done = [each.wait() for each in [start(tmp_path, script, {**pod(rank), **address}) for rank in range(2)]]
    assert all(("loss 2" if script is MODEL else " 2 ") in each.stdout for each in done), done


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [MODEL, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (LOADER, JOB))]
)
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (without(pod(0), "WORLD_SIZE"), "JOB_COMPLETION_INDEX=0, and no WORLD_SIZE above it"),
        (pod(1), "rank 1 of 2, and no MASTER_ADDR"),
        (without(srun(1), "SLURM_JOB_ID"), "rank 1 of 2, and no MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 of 2, and no MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "WORLD_SIZE, and no RANK"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "RANK, and no WORLD_SIZE"),
    ],
)
def test_a_job_or_a_loader_raises_where_something_is_missing(
    script: str, variables: dict[str, str], found: str, tmp_path: Path
):
    done = start(tmp_path, script, variables).wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert "JoinError" in done.stderr
    assert found in done.stderr


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [{"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, {**pod(0), "WORLD_SIZE": "1"}]
)
def test_a_batch_script_and_a_single_pod_train_alone(variables: dict[str, str], tmp_path: Path):
    done = start(tmp_path, MODEL, variables).wait()
    assert done.stdout == "loss 1\n", done.stderr


@pytest.mark.ci_sample(1)
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


@pytest.mark.ci_sample(1)
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


@pytest.mark.exhaustive
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
