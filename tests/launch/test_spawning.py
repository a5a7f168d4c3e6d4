"""`rankless.spawn`: functions in new processes, from a script, from standard input, from an interpreter."""

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from support.jobs import wait_until

import rankless
import rankless.collectives as collectives
from rankless.errors import ConfigError, LaunchError
from rankless.launch.spawn_function import pickle_call

pytestmark = pytest.mark.slow


def summed(rank: int, start: float) -> dict[str, Any]:
    rankless.init()
    total = torch.tensor([start + rank])
    collectives.all_reduce(total)
    return {"rank": rankless.rank(), "size": rankless.world_size(), "total": total.item()}


def by_torch(rank: int, size: int) -> float:
    torch.distributed.init_process_group("gloo")
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total.item() + size


def test_results_are_ordered_by_rank_and_the_processes_find_each_other():
    wanted = [{"rank": rank, "size": 3, "total": 33.0} for rank in range(3)]
    assert rankless.spawn(summed, (10.0,), nprocs=3) == wanted
    assert rankless.spawn(by_torch, args=(2,), nprocs=2) == [3.0, 3.0]


def fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("no such column")
    signal.pause()


def test_a_function_of_a_script_may_name_the_package():
    script: dict[str, Any] = {"rankless": rankless, "__name__": "__main__"}
    exec("def function(): return rankless.rank()", script)
    sent, _ = pickle_call(script["function"], ())
    assert b"rankless" in sent


def test_what_a_worker_raises_is_raised_with_its_rank_and_traceback_and_the_others_end():
    with pytest.raises(KeyError, match="no such column") as raised:
        rankless.spawn(fails, nprocs=2)
    (note,) = raised.value.__notes__
    assert note.startswith("on rank 1 of 2:")
    assert "in fails" in note
    assert not [child for child in psutil.Process().children() if "fails() rank" in " ".join(child.cmdline())]


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fails_oddly(_rank: int) -> None:
    raise Odd(1, 2)


def test_an_error_that_cannot_be_pickled_is_reported_as_text():
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        rankless.spawn(fails_oddly, nprocs=1)


def killed(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_worker_that_is_killed_is_named():
    with pytest.raises(LaunchError, match=r"it was killed by .*SIGKILL"):
        rankless.spawn(killed, nprocs=2)


def waits(_rank: int) -> None:
    signal.pause()


def test_a_handle_waits_for_a_time_and_ends_the_workers():
    handle = rankless.spawn(waits, nprocs=2, join=False)
    assert handle.join(timeout_seconds=0.2) is None
    workers = [psutil.Process(number) for number in handle.process_ids]
    assert all(worker.is_running() for worker in workers)
    handle.terminate()
    assert not any(worker.is_running() for worker in workers)


SCRIPT = """
import sys
import rankless

class Point:
    def __init__(self, x):
        self.x = x

scale = 10

def work(rank, point):
    sys.stdout.write(f"worker {rank}\\n")  # one write: the workers share a terminal
    sys.stdout.flush()
    return Point(point.x * scale + rank)

print("main")
print([type(found) is Point and found.x for found in rankless.spawn(work, (Point(4),), nprocs=2, show="all")])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["script", "standard input", pytest.param("interactive", marks=pytest.mark.exhaustive)])
def test_a_script_needs_no_guard_and_an_interpreter_no_file(way: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    # The interactive interpreter ends a block at an empty line.
    text = SCRIPT.replace("\n\n    def", "\n    def").replace("scale = 10\n\n", "scale = 10\n")
    command = {"script": ["script.py"], "standard input": ["-"], "interactive": ["-i", "-q"]}[way]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        input=None if way == "script" else text.replace('print("main")', '\nprint("main")'),
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines.count("main") == 1
    assert sorted(line for line in lines if line.startswith("worker")) == ["worker 0", "worker 1"]
    assert lines[-1] == "[40, 41]", done.stderr


@pytest.mark.exhaustive
def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import signal, rankless\n"
        "handle = rankless.spawn(lambda rank: signal.pause(), nprocs=2, join=False)\n"
        "print(*handle.process_ids, flush=True)\nsignal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [psutil.Process(int(number)) for number in process.stdout.readline().split()]
    wait_until(lambda: all(len(worker.memory_maps()) > 10 for worker in workers))
    process.kill()
    process.communicate()
    wait_until(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.parametrize(
    ("function", "count", "words"), [(3, 2, "a function"), (waits, 0, "nprocs="), (waits, True, "n")]
)
def test_invalid_arguments_of_spawn_are_rejected(function: Any, count: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        rankless.spawn(function, nprocs=count)


def test_an_unknown_choice_of_output_is_rejected():
    with pytest.raises(ConfigError, match="show="):
        rankless.spawn(waits, show="none")  # type: ignore[arg-type]


def draws(_rank: int) -> tuple[float, float, float]:
    return torch.rand(1).item(), float(numpy.random.random()), random.random()


def test_all_workers_draw_what_the_caller_would_have_drawn_and_the_next_call_other_numbers():
    spawn = rankless.spawn  # the first use imports modules that draw from Python's generator
    torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
    wanted = draws(0)
    torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
    assert spawn(draws, nprocs=2) == [wanted, wanted]
    assert spawn(draws) != [wanted]


def prints_and_ends(rank: int) -> None:
    print(f"printed by {rank}", flush=True)
    print(f"warned by {rank}", file=sys.stderr)
    if rank == 1:
        os._exit(3)


@pytest.mark.parametrize("show", ["first", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_rank_0_is_shown_and_the_end_of_a_hidden_output_comes_with_its_failure(show: Any):
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        pytest.raises(LaunchError, match="exit code 3") as raised,
    ):
        rankless.spawn(prints_and_ends, nprocs=2, show=show)
    shown = output.getvalue() + errors.getvalue()
    assert "printed by 1" in (shown if show == "all" else raised.value.__notes__[0])
    assert ("warned by 1" in shown) == (show == "all")


def where_it_runs(_rank: int) -> tuple[int, int, str, str | None, list[str], bool]:
    threads = torch.get_num_threads()
    return os.getppid(), threads, os.getcwd(), os.environ.get("OF_THIS_CALL"), sys.argv, "numpy" in sys.modules


@pytest.mark.exhaustive
def test_later_calls_share_a_server_and_see_the_callers_folder_and_environment(tmp_path: Path, monkeypatch: Any):
    first = rankless.spawn(where_it_runs, nprocs=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THIS_CALL", "yes")
    second = rankless.spawn(where_it_runs, nprocs=2)
    assert {parent for parent, *_ in first + second} == {first[0][0]}
    assert first[0][0] != os.getpid()
    assert second[0][2:5] == (str(tmp_path), "yes", ["-c"])
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "0")  # torch reads it at its import
    assert rankless.spawn(where_it_runs)[0][0] != first[0][0]


@pytest.mark.exhaustive
def test_a_server_that_was_killed_is_replaced():
    server = psutil.Process(rankless.spawn(where_it_runs)[0][0])
    server.kill()
    assert rankless.spawn(where_it_runs)[0][0] != server.pid


@pytest.mark.exhaustive
def test_without_a_server_workers_are_new_interpreters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")  # another server than that of the tests before
    monkeypatch.delattr(os, "pidfd_open")
    torch.manual_seed(5)
    wanted = torch.rand(1).item()
    torch.manual_seed(5)
    handle = rankless.spawn(where_it_runs, nprocs=1, join=False)
    assert handle.join()[0][0] == os.getpid()
    torch.manual_seed(5)
    assert rankless.spawn(draws)[0][0] == wanted


def leaves(rank: int) -> None:
    sys.exit(5 if rank == 0 else "a reason")


@pytest.mark.exhaustive
def test_a_worker_that_exits_is_reported_with_its_code():
    with pytest.raises(LaunchError, match=r"exit code (5|1)"):
        rankless.spawn(leaves, nprocs=2)


def fails_in_a_job(_rank: int) -> None:
    model = torch.nn.Linear(3, 1)
    predict = rankless.job(model=model)(lambda inputs: model(inputs))
    predict(torch.ones(4, 5))


@pytest.mark.exhaustive
def test_the_traceback_of_a_worker_has_no_frames_of_rankless():
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        rankless.spawn(fails_in_a_job)
    (note,) = raised.value.__notes__
    assert "in fails_in_a_job" in note
    assert f"{os.sep}rankless{os.sep}runtime" not in note
    assert f"{os.sep}rankless{os.sep}jobs" not in note
