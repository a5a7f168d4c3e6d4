"""The diagnosis of hung ranks, on simulated ranks, times and stacks."""

import os
import sysconfig
from pathlib import Path

import msgspec
import pytest
import torch

from rankless.config.extensions import list_extensions
from rankless.launch.watchdog import stack_classifier
from rankless.launch.watchdog.hang_verdict import BLOCKED_SECONDS, DEADLOCK_SECONDS, WAITS_FOR_DISK, diagnose
from rankless.launch.watchdog.phase_timeouts import MIN_STALL_SECONDS, PHASES, STARTUP_STALL_SECONDS, StepRate
from rankless.launch.watchdog.report import format_headline, format_report
from rankless.launch.watchdog.stack_classifier import classify_stack, locate_data_loader_worker
from rankless.launch.watchdog.stacks import parse_main_stack
from rankless.records.events import RankStatus
from rankless.records.worker_status import WorkerStatus
from rankless.user_code import PACKAGE_FOLDER

NEVER = float("inf")
TORCH = os.path.dirname(torch.__file__)
STANDARD = sysconfig.get_paths()["stdlib"]


def where(rank, state, line="train.py:33", doing="all_reduce", still=100.0, **more):
    text = f"load() at {line}" if state != "waits" else ""
    return RankStatus(rank=rank, time_ns=0, state=state, line=line, doing=doing, idle_seconds=still, text=text, **more)


def diagnose_ranks(*ranks, seconds=100.0, stall_limit=10.0):
    return diagnose({each.rank: each for each in ranks}, seconds=seconds, stall_limit=stall_limit)


def abort_after(*ranks, timeout=None, stall_limit=10.0):
    diagnosis = diagnose_ranks(*ranks, stall_limit=stall_limit)
    assert diagnosis is not None
    return diagnosis.abort_after(timeout=timeout, stall_limit=stall_limit)


def test_a_rank_that_does_not_wait_is_missing():
    diagnosis = diagnose_ranks(where(0, "waits"), where(1, "computes"), where(2, "waits"))
    assert [each.rank for each in diagnosis.missing] == [1]
    assert [each.rank for each in diagnosis.waiting] == [0, 2]


def test_if_all_ranks_wait_the_minority_is_missing():
    elsewhere = {"doing": "barrier", "line": "train.py:40"}
    diagnosis = diagnose_ranks(where(0, "waits", **elsewhere), where(1, "waits"), where(2, "waits"))
    assert [each.rank for each in diagnosis.missing] == [0]
    diagnosis = diagnose_ranks(where(0, "waits"), where(1, "waits", **elsewhere))
    assert [each.rank for each in diagnosis.missing] == [1]


def test_ranks_that_all_wait_in_one_place_are_never_ended():
    diagnosis = diagnose_ranks(where(0, "waits"), where(1, "waits"))
    assert diagnosis.missing == ()
    assert diagnosis.abort_after(timeout=None, stall_limit=10.0) == NEVER
    assert "no rank is missing" in format_report(diagnosis, StepRate(), host_name=lambda _rank: "", stacks_file="")


def test_a_rank_whose_connection_is_not_answered_is_missing_and_the_job_ends():
    joining = {"doing": "init_process_group", "is_rendezvous": True}
    ranks = where(0, "waits", **joining), where(1, "waits", connecting_to="10.0.0.1:29500", **joining)
    diagnosis = diagnose_ranks(*ranks)
    assert [each.rank for each in diagnosis.missing] == [1]
    assert "rank 1 did not arrive: it gets no answer from 10.0.0.1:29500 in init_process_group at train.py:33" in (
        format_report(diagnosis, StepRate(), host_name=lambda _rank: "", stacks_file="")
    )
    assert abort_after(*ranks) == DEADLOCK_SECONDS
    both = (where(rank, "waits", connecting_to=f"10.0.0.{rank}:1", **joining) for rank in (0, 1))
    assert abort_after(*both) == DEADLOCK_SECONDS


def test_ranks_that_all_wait_in_a_rendezvous_do_not_find_each_other():
    diagnosis = diagnose_ranks(*(where(rank, "waits", is_rendezvous=True) for rank in (0, 1)))
    text = format_report(diagnosis, StepRate(), host_name=lambda _rank: "", stacks_file="")
    assert "no rank is missing: the ranks do not find each other" in text


def test_no_diagnosis_if_a_rank_has_just_arrived():
    assert diagnose_ranks(where(0, "waits"), where(1, "waits", still=0.1)) is None
    assert diagnose_ranks(where(0, "waits"), where(1, "waits", still=6.0)).seconds == 6.0


def test_an_ended_rank_is_missing_only_if_no_other_rank_is():
    diagnosis = diagnose_ranks(where(0, "waits"), where(1, "ended"), where(2, "computes"))
    assert [each.rank for each in diagnosis.missing] == [2]
    diagnosis = diagnose_ranks(where(0, "waits"), where(1, "ended"))
    assert [each.rank for each in diagnosis.missing] == [1]


def test_ranks_that_are_all_blocked_are_reported_in_every_phase():
    for phase in PHASES:
        diagnosis = diagnose_ranks(*(where(rank, "blocked", phase=phase.name, still=40.0 - rank) for rank in (0, 1)))
        assert len(diagnosis.missing) == 2
        assert diagnosis.seconds == 39.0  # since then nothing has moved
        assert diagnosis.least_seconds == phase.least_seconds
        assert phase.doing in format_headline(diagnosis, host_name=lambda _rank: "")
    assert diagnose_ranks(where(0, "blocked"), where(1, "computes")) is None
    assert diagnose_ranks(where(0, "ended"), where(1, "ended")) is None
    assert diagnose_ranks(where(0, "blocked"), where(1, "debugged")) is None
    disk = diagnose_ranks(where(0, "blocked"), where(1, "computes", doing=WAITS_FOR_DISK))
    assert [each.rank for each in disk.missing] == [0, 1]


def test_a_process_that_outlives_its_script_holds_up_the_run_only_if_no_rank_is_in_its_script():
    lingers = where(0, "ended", doing="still runs", phase="teardown")
    ended = where(1, "ended", doing="")
    diagnosis = diagnose_ranks(lingers, ended)
    assert [each.rank for each in diagnosis.missing] == [0]
    assert diagnosis.abort_after(timeout=None, stall_limit=10.0) == NEVER
    assert diagnosis.abort_after(timeout=20.0, stall_limit=10.0) == 20.0
    assert "its script has ended, but its process still runs" in format_headline(diagnosis, host_name=lambda _: "")
    assert diagnose_ranks(lingers, where(1, "computes")) is None
    assert diagnose_ranks(ended) is None


def test_a_rank_that_has_not_started_is_named_with_the_process_that_starts_it():
    text = "its process has not started: process 7, which starts the workers,"
    starts = where(0, "stopped", doing="kill -CONT 7 resumes it", phase="start")
    diagnosis = diagnose_ranks(msgspec.structs.replace(starts, text=text))
    assert f"{text} is stopped by a signal (kill -CONT 7 resumes it)" in format_headline(
        diagnosis, host_name=lambda _: ""
    )


def test_without_a_timeout_a_job_ends_only_if_nothing_in_it_runs():
    assert abort_after(where(0, "waits"), where(1, "computes")) == NEVER
    assert abort_after(where(0, "waits"), where(1, "blocked"), where(2, "computes")) == NEVER
    assert abort_after(where(0, "waits"), where(1, "debugged")) == NEVER
    assert abort_after(where(0, "blocked"), where(1, "blocked")) == NEVER
    assert abort_after(where(0, "waits", still=1.0), where(1, "blocked")) == NEVER
    assert abort_after(where(0, "waits"), where(1, "blocked")) == BLOCKED_SECONDS
    assert abort_after(where(0, "waits"), where(1, "stopped")) == BLOCKED_SECONDS
    assert abort_after(where(0, "waits"), where(1, "ended")) == DEADLOCK_SECONDS
    assert abort_after(where(0, "waits"), where(1, "waits", line="train.py:40")) == DEADLOCK_SECONDS
    assert abort_after(where(0, "waits"), where(1, "blocked"), stall_limit=100.0) == 1000.0


def test_the_timeout_ends_the_job_unless_a_debugger_is_attached():
    assert abort_after(where(0, "waits"), where(1, "computes"), timeout=30.0) == 30.0
    assert abort_after(where(0, "blocked"), where(1, "blocked"), timeout=30.0) == 30.0
    assert abort_after(where(0, "waits"), where(1, "debugged"), timeout=30.0) == NEVER
    assert abort_after(where(0, "waits"), where(1, "blocked"), timeout=0) == NEVER


def test_the_report_on_many_ranks_stays_short():
    diagnosis = diagnose_ranks(
        *(where(rank, "waits") for rank in range(60)),
        *(where(rank, "blocked", stack=tuple(f"frame {n}" for n in range(20))) for rank in range(60, 64)),
    )
    text = format_report(
        diagnosis, StepRate(), host_name=lambda rank: f"host{rank // 32}", stacks_file="log/stacks.txt"
    )
    assert len(text.splitlines()) <= 15
    assert "ranks 0-59 wait in all_reduce at train.py:33" in text
    assert "rank 60 on host1 did not arrive: it is in load() at train.py:33" in text
    assert "rank 61 on host1" in format_headline(diagnosis, host_name=lambda rank: f"host{rank // 32}")


def make_step_rate(*gaps):
    step_rate, now = StepRate(), 1000.0
    step_rate.update([WorkerStatus(0, 1, now)])
    for count, gap in enumerate(gaps, 2):
        now += gap
        step_rate.update([WorkerStatus(0, count, now)])
    return step_rate


def test_the_stall_limit_grows_with_steps_and_finished_pauses():
    assert StepRate().stall_limit == STARTUP_STALL_SECONDS
    assert make_step_rate(0.2, 0.2, 0.2).stall_limit == MIN_STALL_SECONDS
    assert make_step_rate(2.0, 2.0, 2.0).stall_limit == 40.0
    assert make_step_rate(0.2, 60.0, 0.2).stall_limit == 120.0
    step_rate = make_step_rate(0.2, 0.2)
    step_rate.record_pause(45.0)
    assert step_rate.stall_limit == 90.0


def test_a_step_of_any_rank_is_progress():
    step_rate = StepRate()
    step_rate.update([WorkerStatus(0, 10, 100.0), WorkerStatus(0, 9, 99.9)])
    step_rate.update([WorkerStatus(0, 10, 100.0), WorkerStatus(0, 20, 101.0)])
    assert step_rate.step_seconds == 0.1
    assert step_rate.seconds_since_step(103.0) == 2.0
    assert step_rate.steps == 20


DUMP = f"""Thread 0x00000000000000aa (most recent call first):
  File "{STANDARD}/threading.py", line 327 in wait
  File "/data/other.py", line 3 in watch

Current thread 0x00000000000000bb (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3000 in all_gather
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "{TORCH}/distributed/distributed_c10d.py", line 4000 in all_gather_object
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/data/parts.py", line 12 in share
  File "/data/train.py", line 20 in <module>
"""


def test_a_stack_gives_the_collective_and_the_lines_of_the_script():
    location = classify_stack(parse_main_stack(DUMP, 0xBB))
    assert location.collective == "all_gather_object"
    assert location.line == "parts.py:12"
    assert location.text == "share() at parts.py:12, called from train.py:20"
    assert location.stack[0] == 'File "train.py", line 20, in <module>'


def test_hosts_that_keep_the_script_in_different_folders_wait_at_one_line():
    here, there = (parse_main_stack(DUMP.replace("/data/", folder), 0xBB) for folder in ("/data/", "/home/b/copy/"))
    assert classify_stack(here) == classify_stack(there)


def classify(*frames, script="/data/train.py", line=20):
    """Classify a stack with these library frames above a line of a script."""
    inner = "".join(f'  File "{file}", line 1 in {function}\n' for file, function in frames)
    thread = "Current thread 0x00000000000000bb (most recent call first):\n"
    return classify_stack(parse_main_stack(f'{thread}{inner}  File "{script}", line {line} in <module>\n', 0xBB))


def test_a_rank_that_waits_for_others_to_join_is_in_a_rendezvous():
    c10d, joining = f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/distributed/rendezvous.py"
    wrapper = (f"{TORCH}/distributed/c10d_logger.py", "wrapper")
    env = classify(
        (joining, "_create_c10d_store"), (joining, "_env_rendezvous_handler"), (c10d, "init_process_group"), wrapper
    )
    assert (env.collective, env.is_rendezvous) == ("init_process_group", True)
    gloo = classify((c10d, "_new_process_group_helper"), (c10d, "new_group"), wrapper)
    assert (gloo.collective, gloo.is_rendezvous) == ("new_group", True)
    own = classify(
        (f"{PACKAGE_FOLDER}runtime/rendezvous/join_at_tcp_address.py", "join"), (f"{PACKAGE_FOLDER}api.py", "init")
    )
    assert (own.collective, own.is_rendezvous) == ("rankless.init", True)
    reduction = classify((c10d, "all_reduce"), wrapper)
    assert (reduction.collective, reduction.is_rendezvous) == ("all_reduce", False)


@pytest.mark.parametrize(
    ("text", "collective"),
    [
        ('store = dist.TCPStore("10.0.0.1", 29500, 2)', "TCPStore()"),
        ("store = TCPStore(host, port, size, is_master=True)", "TCPStore()"),
        ('torch.distributed.FileStore("/shared/store", 2)', "FileStore()"),
        ('value = store.get("weights")', "store.get()"),
        ('self.tcp_store.wait(["done"])', "tcp_store.wait()"),
        ('value = settings.get("weights")', ""),
        ("restored = model.load_state_dict(state)", ""),
    ],
)
def test_a_line_that_waits_in_a_store_is_a_rendezvous(text, collective, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{text}\n")
    location = classify(script=script, line=1)
    assert (location.collective, location.is_rendezvous) == (collective, collective != "")


def test_every_module_that_the_classifier_lists_exists():
    listed = [
        *stack_classifier._WAITING_MODULES,
        *stack_classifier._MODULE_LABELS,
        "api.py",
    ]
    assert [path for path in listed if not os.path.exists(os.path.join(PACKAGE_FOLDER, path))] == []


def test_every_file_that_an_extension_declares_exists():
    for extension in list_extensions():
        stacks = extension.stacks
        beginnings = (*stacks.waits, *stacks.joins, *stacks.labels, *stacks.calls)
        assert [each for each in beginnings if not list(Path(extension.folder).glob(f"{each}*"))] == []


def test_a_lock_is_not_a_collective():
    assert classify_stack(parse_main_stack(DUMP, 0xAA)).collective == ""


def test_a_debugger_anywhere_in_the_stack_is_detected():
    text = DUMP.replace(f"{TORCH}/distributed/c10d_logger.py", f"{STANDARD}/bdb.py")
    assert classify_stack(parse_main_stack(text, 0xBB)).is_debugged


def test_only_a_busy_data_loader_worker_has_a_location():
    reader = f"{TORCH}/utils/data/_utils/worker.py"
    loop = f'  File "{reader}", line 349 in _worker_loop\n  File "/data/train.py", line 9 in f\n'
    thread = "Current thread 0x00000000000000bb (most recent call first):\n"
    busy = parse_main_stack(f'{thread}  File "/data/data.py", line 4 in __getitem__\n{loop}', 0xBB)
    idle = parse_main_stack(f'{thread}  File "{STANDARD}/multiprocessing/queues.py", line 113 in get\n{loop}', 0xBB)
    assert locate_data_loader_worker(busy).text == "__getitem__() at /data/data.py:4"
    assert locate_data_loader_worker(idle) is None
    assert locate_data_loader_worker(parse_main_stack(DUMP, 0xBB)) is None
