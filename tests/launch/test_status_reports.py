"""Rates and states of two readings of a run."""

import pytest

from rankless.launch.status.build_status import measure_step_rate, report_running
from rankless.launch.status.read_counters import ProcessReading, RoleProcessReading, RunReading, WorkerReading
from rankless.launch.watchdog.process_activity import ProcessStats
from rankless.launch.watchdog.stack_classifier import StackLocation
from rankless.records.live_run import LiveRun, LiveWorker, ProcessRow, ProcessStage
from rankless.records.run_status import RunStatus
from rankless.records.server_traffic_counters import ServerActivity
from rankless.records.worker_status import STEPS_KEPT, WorkerStatus
from rankless.terminal.status_table import format_status

NOW = 1000.0


def page_of(*times: float, count: int | None = None, rate: float = 0.0) -> WorkerStatus:
    return WorkerStatus(
        main_thread=1,
        count=len(times) if count is None else count,
        last=times[-1] if times else None,
        samples_per_second=rate,
        step_times=times[-STEPS_KEPT:],
    )


@pytest.mark.parametrize(
    ("times", "rate"),
    [
        ((), None),
        ((999.0,), None),
        ((998.0, 999.0), 1.0),
        ((999.0, 999.5, 1000.0), 2.0),
        ((900.0, 999.0, 1000.0), 1.0),  # a pause that is over does not count
        ((960.0, 980.0), 1 / 20),  # a step takes longer than the period
        ((940.0, 950.0), 1 / 60),  # no step for five times as long
        ((100.0, 100.1), 1 / 900),
    ],
)
def test_the_rate_is_that_of_the_last_steps(times: tuple[float, ...], rate: float | None):
    assert measure_step_rate(None, page_of(*times), NOW) == (None if rate is None else pytest.approx(rate, rel=1e-3))


def test_steps_faster_than_the_page_remembers_are_counted_between_readings():
    before = page_of(999.0, 999.001, count=500)
    after = page_of(*(999.98 + number / 1000 for number in range(STEPS_KEPT)), count=1000)
    assert measure_step_rate(before, after, NOW) == pytest.approx(500 / (999.995 - 999.001))


def test_steps_at_one_moment_have_no_rate():
    assert measure_step_rate(None, page_of(999.0, 999.0), NOW) is None


def make_run(*, stage: ProcessStage = "serves", servers: int = 1, exit_code: int | None = None) -> LiveRun:
    return LiveRun(
        layout=1,
        process_id=1,
        run_id="run",
        log_folder="/log/run",
        script="train.py",
        arguments=(),
        seed=None,
        started="2026-11-27T00:00:00+00:00",
        started_monotonic=0.0,
        host=0,
        host_names=("",),
        workers=(
            LiveWorker(rank=0, host=0, device="cpu", log_file="rank0.log", page=3, process_id=7, exit_code=exit_code),
        ),
        process_counts={"server": servers},
        processes=tuple(
            ProcessRow(
                role="server",
                index=index,
                address="ipc:///s",
                log_file="",
                process_id=8,
                stage=stage,
                status_descriptor=4,
            )
            for index in range(servers)
        ),
    )


def process(state: str = "S", cpu: float = 0.0, switches: int = 0, tracer: int = 0) -> ProcessReading:
    return ProcessReading(stats=ProcessStats(state, cpu, switches, tracer, 0), memory_bytes=4096)


def activity(transactions: int, at: float, *, process_id: int = 8, ahead: int = 0) -> ServerActivity:
    return ServerActivity(
        process_id=process_id,
        monotonic=at,
        transactions=transactions,
        requests=10 * transactions,
        pulled_rows=0,
        pulled_bytes=0,
        pushed_rows=100 * transactions,
        pushed_bytes=0,
        refused={"another token than this run's": 2, "\x1b[2J\udcff": 1} if ahead else {},
        transactions_ahead=(ahead,),
        table_count=0,
        tables=(),
    )


def reading(
    at: float,
    worker: ProcessReading | None = None,
    *,
    server: ServerActivity | None = None,
    server_process: ProcessReading | None = None,
    collective: str = "",
    stage: ProcessStage = "serves",
) -> RunReading:
    location = StackLocation(collective=collective, text="train.py:3")
    return RunReading(
        run=make_run(stage=stage),
        monotonic=at,
        workers={0: WorkerReading(page=page_of(999.0), process=worker, location=location)},
        processes={("server", 0): RoleProcessReading(activity=server, process=server_process)},
    )


def status_of(before: RunReading | None, after: RunReading) -> RunStatus:
    return report_running(before, after)


@pytest.mark.parametrize(
    ("before", "after", "collective", "state"),
    [
        (process(), process(), "", "idle"),
        (process(), process(), "all_reduce", "waits"),
        (process(), process(cpu=0.4), "", "computes"),
        (process(), process(switches=100), "", "computes"),
        (process(), process("R"), "", "computes"),
        (process(), process("D"), "", "computes"),
        (None, process(), "", "computes"),
        (process(), process("T"), "all_reduce", "stopped"),
        (process(), process("t"), "", "debugged"),
        (process(), process(tracer=5), "all_reduce", "debugged"),
        (process(), process("Z"), "", "ended"),
        (process(), None, "", "ended"),
    ],
)
def test_the_state_of_a_worker_follows_from_two_readings(
    before: ProcessReading | None, after: ProcessReading | None, collective: str, state: str
):
    status = status_of(reading(NOW - 0.5, before), reading(NOW, after, collective=collective))
    assert status.workers[0].state == state


def test_rates_of_a_server_are_over_the_time_between_what_it_has_published():
    before = reading(NOW - 1.0, server=activity(10, NOW - 1.1), server_process=process())
    after = reading(NOW, server=activity(30, NOW - 0.1), server_process=process(cpu=0.5))
    (server,) = status_of(before, after).servers
    assert server.transactions_per_second == pytest.approx(20.0)
    assert server.requests_per_second == pytest.approx(200.0)
    assert server.pushed_rows_per_second == pytest.approx(2000.0)
    assert server.cpu_percent == pytest.approx(50.0)


def test_a_server_that_was_idle_for_long_has_the_rate_since_the_first_reading():
    before = reading(NOW - 1.0, server=activity(10, NOW - 600), server_process=process())
    after = reading(NOW, server=activity(30, NOW), server_process=process())
    assert status_of(before, after).servers[0].transactions_per_second == pytest.approx(20 / 1.25)
    still = status_of(before, reading(NOW, server=activity(10, NOW - 600), server_process=process()))
    assert still.servers[0].transactions_per_second == 0.0


def test_counters_of_an_earlier_process_of_a_server_make_no_rate():
    before = reading(NOW - 1.0, server=activity(100, NOW - 1.0), server_process=process())
    after = reading(NOW, server=activity(100, NOW, process_id=9), server_process=process())
    (server,) = status_of(before, after).servers
    assert (server.transactions_per_second, server.requests_per_second) == (None, None)


@pytest.mark.parametrize(
    ("stage", "found", "state"),
    [
        ("serves", process(), "serves"),
        ("starting", process(), "starting"),
        ("serves", process("T"), "stopped"),
        ("serves", process(tracer=1), "debugged"),
        ("restarting", None, "restarting"),
        ("restarting", process(), "restarting"),
        ("serves", None, "ended"),
        ("serves", process("Z"), "ended"),
        ("ended", process(), "ended"),
    ],
)
def test_the_state_of_a_server_is_its_process_and_its_stage(
    stage: ProcessStage, found: ProcessReading | None, state: str
):
    status = status_of(None, reading(NOW, process(), server_process=found, stage=stage))
    assert status.servers[0].state == state


def test_the_text_names_what_servers_refuse_and_how_far_workers_are_ahead():
    after = reading(NOW, process(), server=activity(3, NOW, ahead=4), server_process=process())
    lines = format_status(status_of(None, after), script="train.py", arguments=["a\nb\x1b[31m"]).splitlines()
    assert lines[0] == "run: train.py a b?[31m"
    heading = next(line for line in lines if line.split()[:2] == ["rank", "pid"])
    row = lines[lines.index(heading) + 1]
    assert row[: heading.index("ahead") + len("ahead")].split()[-1] == "4"
    assert lines[-1] == "  server 0 has refused 3 messages: 2 of another token than this run's, 1 of ?[2J?"


def test_a_worker_that_has_not_started_has_no_figures():
    run = make_run(servers=0)
    status = report_running(None, RunReading(run=run, monotonic=NOW, workers={}, processes={}))
    (worker,) = status.workers
    assert (worker.state, worker.steps, status.steps) == ("starting", None, None)
    ended = RunReading(run=make_run(servers=0, exit_code=-9), monotonic=NOW, workers={}, processes={})
    assert "ended, -9" in format_status(report_running(None, ended), script="train.py", arguments=())
