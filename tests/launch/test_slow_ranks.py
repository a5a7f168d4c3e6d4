"""A rank that takes longer than others for its part of a step is named: how slow it is, and since when."""

import re
import sys
import time
from pathlib import Path

import msgspec
import pytest
from support.hosts import two_hosts
from support.warm_runs import rankless

from rankless.launch.watchdog.slow_ranks import SlowRanks, find_stage
from rankless.records.events import Exited, Notice, SlowRankChanged, Started, StepTimes
from rankless.records.main_thread_time_in_collectives import CollectiveTime
from rankless.records.parallel_plan import PlannedAxis
from rankless.records.run_status import RunStatus

SCRIPT = """
import time, torch, rankless
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

@rankless.job(model=net, optimizer=optimizer)
def train(rows):
    return net(rows).square().mean()

begin = rankless.once(time.monotonic)
while rankless.once(time.monotonic) < begin + SECONDS:
    time.sleep(0.3 if rankless.rank() == SLOW else 0.1)
    train(torch.ones(12, 64))
"""


def make_ranks(count: int, mesh: tuple[PlannedAxis, ...] = ()) -> SlowRanks:
    found = SlowRanks({}, mesh, is_host_0=True)
    for rank in range(count):
        found.receive(Started(rank=rank, time_ns=0, pid=1, log_file=""))
    return found


def measure(ranks: SlowRanks, now: float, own: dict[int, float]) -> list:
    """Return the records after one period in which each rank has taken so many seconds for its part of a step."""
    slowest = max(own.values())
    for rank, seconds in own.items():
        times = StepTimes(rank=rank, time_ns=0, step_seconds=slowest, own_seconds=seconds, period_seconds=5.0)
        ranks.receive(times)
    return ranks.tick(now)


def test_a_rank_is_slow_after_two_periods_and_as_fast_as_others_after_two_more():
    ranks = make_ranks(4)
    own = {0: 0.2, 1: 0.2, 2: 0.21, 3: 0.4}
    assert measure(ranks, 10, own) == []
    changed, notice = measure(ranks, 20, own)
    assert isinstance(changed, SlowRankChanged)
    assert (changed.rank, changed.is_over, changed.slow.own_seconds, changed.slow.usual_seconds) == (3, False, 0.4, 0.2)
    pattern = (
        r"rank 3 is slow since \d\d:\d\d:\d\d UTC: its part of a step takes 400 ms, 2.0 times as long as 200 ms on "
        "other ranks, which wait for it"
    )
    assert re.fullmatch(pattern, notice.text), notice.text
    assert measure(ranks, 30, own) == []
    fast = {**own, 3: 0.2}
    assert measure(ranks, 40, fast) == []
    assert measure(ranks, 50, own) == []  # one fast period is none
    assert measure(ranks, 60, fast) == []
    changed, notice = measure(ranks, 70, fast)
    assert changed.is_over
    assert re.fullmatch(r"rank 3 is as fast as the others since \d\d:\d\d:\d\d UTC", notice.text)


@pytest.mark.parametrize(
    "own",
    [
        {0: 0.2, 1: 0.25},  # less than 1.3 times
        {0: 0.3, 1: 0.3, 2: 0.3},
    ],
)
def test_no_rank_is_slow_for_little(own: dict[int, float]):
    ranks = make_ranks(len(own))
    assert [record for now in (10, 20, 30) for record in measure(ranks, now, own)] == []


def test_no_rank_is_slow_whose_part_is_little_of_a_step():
    ranks = make_ranks(4)
    own = {0: 0.001, 1: 0.002, 2: 1.0, 3: 1.0}
    found = [record for now in (10, 20, 30) for record in measure(ranks, now, own)]
    assert {record.rank for record in found if isinstance(record, Notice)} == {2, 3}


def test_stages_of_a_pipeline_are_not_compared():
    mesh = tuple(PlannedAxis(name=name, role=name, size=2) for name in ("pipeline", "data"))
    ranks = make_ranks(4, mesh)
    own = {0: 0.1, 1: 0.1, 2: 0.3, 3: 0.6}
    measure(ranks, 10, own)
    changed, _ = measure(ranks, 20, own)
    assert (changed.rank, changed.slow.usual_seconds) == (3, 0.3)
    kinds = (PlannedAxis(name="pipeline", role="pipeline", size=3, stage_workers=((0, 2), (1,))),)
    assert [find_stage(rank, kinds) for rank in range(3)] == [0, 1, 0]


def test_nobody_waits_for_what_a_lost_rank_would_have_measured():
    ranks = make_ranks(3)
    ranks.receive(Exited(rank=2, time_ns=0, exit_code=-9))
    assert measure(ranks, 10, {0: 0.1, 1: 0.3}) == []
    assert [record.rank for record in measure(ranks, 20, {0: 0.1, 1: 0.3})] == [1, 1]


def test_the_time_of_nested_collectives_counts_once():
    counted = CollectiveTime()
    begin = time.monotonic_ns()
    with counted, counted:
        time.sleep(0.02)
    assert 20e6 <= counted.nanoseconds <= time.monotonic_ns() - begin


@pytest.mark.slow
def test_a_run_names_its_slow_rank_and_so_does_its_status(tmp_path: Path):
    (tmp_path / "script.py").write_text(f"SLOW, SECONDS = 1, 33\n{SCRIPT}")
    words = '[sys.executable, "-m", "rankless", "status", "--json", "log/latest"]'
    (tmp_path / "watch.py").write_text(
        f'import subprocess, sys, time; time.sleep(28); subprocess.run({words}, stdout=open("status.json", "w"))'
    )
    (tmp_path / "both.py").write_text(
        "import os, subprocess, sys\n"
        'if os.environ["RANK"] == "0":\n    subprocess.Popen([sys.executable, "watch.py"])\n'
        'exec(open("script.py").read())\n'
    )
    done = rankless("run", "-n", "3", "--devices", "cpu", "both.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if " is slow since " in line]
    assert len(lines) == 1, done.stderr
    assert re.match(r"rankless: rank 1 is slow since \d\d:\d\d:\d\d UTC: its part of a step takes 3\d\d ms", lines[0])
    status = msgspec.json.decode((tmp_path / "status.json").read_text(), type=RunStatus)
    assert [each.rank for each in status.slow_ranks] == [1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_host_0_names_a_slow_rank_of_another_host(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        (tmp_path / "script.py").write_text(f"SLOW, SECONDS = 3, 33\n{SCRIPT}")
        words = (sys.executable, "-m", "rankless", "run", "--hosts", "a:2,b:2", "--devices", "cpu", "script.py")
        job = hosts.start("a", words, cwd=tmp_path)
        out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    assert re.search(r"rankless: rank 3 is slow since ", err), err
    assert "rank 0 is slow" not in err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_rank_is_named_where_rankless_does_not_see_who_waits(tmp_path: Path):
    (tmp_path / "script.py").write_text(f"SLOW, SECONDS = 1, 20\n{SCRIPT}")
    done = rankless("run", "-n", "2", "--devices", "cpu", "--backend", "gloo", "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " is slow" not in done.stderr
