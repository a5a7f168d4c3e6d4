"""Failure attribution names the root cause from the records in their order of arrival."""

import pytest

from rankless.launch.supervisor.failure_attribution import (
    attribute_failure,
    describe_secondary_failure,
    is_secondary_failure,
)
from rankless.launch.supervisor.verdict_types import Verdict
from rankless.records.events import (
    NO_RANK,
    AnyRecord,
    Exited,
    GroupTeardown,
    HangDetected,
    ProcessExited,
    Raised,
    ScriptFinished,
    Started,
)

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:4411"

TIMED_OUT = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    dist.all_reduce(loss)
  File "/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete
"""


def raised(rank: int, message: str = "x is wrong") -> Raised:
    return Raised(rank=rank, time_ns=0, error_type="ValueError", message=message, traceback=f"...\n{message}\n")


def left(rank: int, code: int) -> ScriptFinished:
    return ScriptFinished(rank=rank, time_ns=0, exit_code=code)


def exited(rank: int, code: int) -> Exited:
    return Exited(rank=rank, time_ns=0, exit_code=code)


def leaving(rank: int, traceback: str = "") -> GroupTeardown:
    return GroupTeardown(rank=rank, time_ns=0, error_type="KeyError", message="'a'", traceback=traceback)


def verdict_on(*records: AnyRecord) -> Verdict:
    verdict = attribute_failure(records)
    assert verdict is not None
    return verdict


def test_there_is_no_verdict_while_nothing_has_failed() -> None:
    started = Started(rank=0, time_ns=0, pid=1, log_file="")
    assert attribute_failure([started, left(0, 0), leaving(1), exited(0, 0), left(1, 0), exited(1, 0)]) is None


def test_a_rank_that_reports_its_own_exception_is_a_root_cause() -> None:
    text = "RanksDiverged: found: rank 1 raised MemoryError: no room"
    assert is_secondary_failure(raised(0, text))
    assert not is_secondary_failure(raised(1, text))
    assert is_secondary_failure(raised(1, f"{text}; rank 0 aborted the group"))
    assert is_secondary_failure(raised(2, "CollectiveError: found: rank 2 aborted the group"))
    assert verdict_on(raised(0, text), raised(1, text)).root_cause_rank == 1


def test_the_first_rank_that_raises_is_the_root_cause() -> None:
    verdict = verdict_on(raised(2), raised(1), left(2, 1), exited(2, 1))
    assert (verdict.root_cause_rank, verdict.exit_code, verdict.cause) == (2, 1, "raised")
    assert verdict.headline == "raised ValueError: x is wrong"


def test_a_secondary_failure_that_reports_first_is_not_the_root_cause() -> None:
    assert verdict_on(raised(0, LOST), raised(1)).root_cause_rank == 1


@pytest.mark.parametrize(
    "message",
    [
        "rank 1 cannot go on with the ranks of other hosts",
        "the connection to rank 2 is lost (it is closed)",
        "the connection to a rank of another host is lost (Broken link)",
    ],
)
def test_a_host_that_has_lost_another_is_a_secondary_failure(message: str) -> None:
    assert is_secondary_failure(raised(0, message))


def test_a_chained_traceback_shows_a_secondary_failure() -> None:
    chained = Raised(rank=0, time_ns=0, error_type="MyError", message="lost", traceback=f"{LOST}\n...MyError")
    assert verdict_on(chained, exited(1, -9)).root_cause_rank == 1


def test_a_rank_that_repeats_another_ranks_error_is_a_secondary_failure() -> None:
    assert verdict_on(raised(1, "rank 0 raised ValueError: no"), raised(0)).root_cause_rank == 0


def test_a_group_teardown_during_an_exception_is_the_root_cause() -> None:
    verdict = verdict_on(leaving(1, "Traceback\nKeyError: 'a'\n"), raised(0, LOST), left(0, 1), exited(0, 1))
    assert (verdict.root_cause_rank, verdict.headline) == (1, "raised KeyError: 'a'")


def test_an_early_exit_is_a_failure_only_once_others_lost_the_rank() -> None:
    assert attribute_failure([left(1, 0), exited(1, 0)]) is None
    verdict = verdict_on(left(1, 0), exited(1, 0), raised(0, LOST))
    assert (verdict.root_cause_rank, verdict.exit_code) == (1, 1)
    assert "ended its script while other ranks still needed it" in verdict.headline


def test_an_exit_after_a_lost_connection_is_not_the_root_cause() -> None:
    verdict = verdict_on(raised(0, LOST), left(1, 0))
    assert (verdict.root_cause_rank, verdict.cause) == (0, "lost")


def test_a_late_exit_record_from_another_host_is_the_root_cause() -> None:
    records = [raised(0, LOST), leaving(1), left(2, 0)]
    verdict = attribute_failure(records, host_of=lambda rank: rank)
    assert verdict is not None
    assert (verdict.root_cause_rank, verdict.headline) == (
        1,
        "destroyed its process group while other ranks still needed it",
    )


def test_a_secondary_failure_on_another_host_is_not_the_root_cause() -> None:
    records = [raised(0, LOST), leaving(1, LOST), raised(1, LOST), left(1, 1), exited(1, 1)]
    verdict = attribute_failure(records, host_of=lambda rank: rank)
    assert verdict is not None
    assert (verdict.root_cause_rank, verdict.cause) == (0, "lost")


def test_an_unreported_exit_is_the_root_cause_although_it_is_known_late() -> None:
    verdict = verdict_on(raised(0, LOST), exited(1, 0))
    assert (verdict.root_cause_rank, verdict.cause) == (1, "left")


def test_a_death_by_signal_outweighs_an_orderly_exit_reported_earlier() -> None:
    verdict = verdict_on(left(0, 3), exited(1, -9))
    assert (verdict.root_cause_rank, verdict.exit_code) == (1, 137)


def test_the_scripts_exit_code_is_the_jobs() -> None:
    verdict = verdict_on(left(1, 7), raised(0, LOST), exited(1, 7))
    assert (verdict.root_cause_rank, verdict.exit_code) == (1, 7)


def test_a_crash_after_the_script_finished_is_a_failure() -> None:
    verdict = verdict_on(left(0, 0), exited(0, -11))
    assert (verdict.root_cause_rank, verdict.exit_code, verdict.cause) == (0, 139, "signal")


def test_secondary_failures_wait_longer_for_a_better_verdict() -> None:
    assert verdict_on(raised(0, LOST)).settling_seconds == 0.6
    assert verdict_on(left(1, 0), raised(0, LOST)).settling_seconds == 0.3
    assert verdict_on(raised(0)).settling_seconds == 1.0  # it prints its traceback
    assert verdict_on(raised(0), left(0, 1)).settling_seconds <= 0.05


def timed_out(rank: int) -> Raised:
    return Raised(rank=rank, time_ns=0, error_type="RuntimeError", message="Timed out", traceback=TIMED_OUT)


def test_a_timeout_is_not_the_root_cause_if_another_rank_failed() -> None:
    assert verdict_on(timed_out(0), raised(1)).root_cause_rank == 1
    assert verdict_on(timed_out(0), left(0, 1), exited(0, 1), exited(1, -9)).root_cause_rank == 1
    assert verdict_on(left(1, 0), timed_out(0)).root_cause_rank == 1


def test_the_rank_that_the_watchdog_finds_missing_causes_a_timeout() -> None:
    stuck = HangDetected(rank=1, time_ns=0, headline="did not arrive: it is at train.py:8", traceback="")
    assert verdict_on(timed_out(0), left(0, 1), stuck) == verdict_on(stuck)


def test_an_unexplained_timeout_names_the_waiting_and_the_silent_ranks() -> None:
    started = [Started(rank=rank, time_ns=0, pid=1, log_file="") for rank in range(3)]
    verdict = verdict_on(*started, timed_out(0), timed_out(2))
    assert verdict.cause == "timeout"
    assert "waited in all_reduce at" in verdict.headline
    assert "train.py:12 until its timeout of 3 s; did not report waiting there: rank 1" in verdict.headline


def test_a_timeout_outside_collectives_is_an_ordinary_error() -> None:
    text = "Timed out waiting 9ms for x"
    trace = f'Traceback (most recent call last):\n  File "/home/me/a.py", line 1, in <module>\nE: {text}'
    record = Raised(rank=1, time_ns=0, error_type="E", message=text, traceback=trace)
    assert (verdict_on(record).cause, verdict_on(record).root_cause_rank) == ("raised", 1)


def test_a_stall_names_the_rank_that_submitted_nothing() -> None:
    missing = "Missing ranks:\n0: [allreduce.b]\n2: [allreduce.a]"
    text = f"Horovod has been shut down. … Stalled for more than 5 seconds.\n{missing}"
    verdict = verdict_on(raised(1, text), raised(0, text), left(0, 1), exited(0, 1))
    assert (verdict.root_cause_rank, verdict.cause, verdict.exit_code) == (0, "stalled", 1)
    assert verdict.headline == (
        "did not submit [allreduce.b], for which others waited more than 5 s; rank 2 not [allreduce.a]"
    )
    assert verdict_on(raised(1, text), exited(2, -9)).root_cause_rank == 2


LOST_SERVER = """
expected: server 1 at ipc:///tmp/run/1 to answer worker 0
found:    the connection has broken: the server has ended, or cannot be reached any more"""


def server_exited(server: int, code: int, *, is_restarted: bool = False, note: str = "") -> ProcessExited:
    return ProcessExited(
        rank=NO_RANK, time_ns=0, role="server", number=server, exit_code=code, is_restarted=is_restarted, note=note
    )


def test_a_server_that_ends_is_the_root_cause_and_its_workers_are_not() -> None:
    for records in ([server_exited(1, -9), raised(0)], [raised(0, LOST_SERVER), server_exited(1, -9), exited(0, 1)]):
        verdict = verdict_on(*records)
        assert (verdict.root_cause, verdict.exit_code, verdict.cause) == ("server 1", 137, "signal")
        assert verdict.headline == "was killed by signal 9 (SIGKILL)"
    assert verdict_on(left(0, 1), server_exited(0, 3)).exit_code == 3
    assert verdict_on(server_exited(0, 0)).exit_code == 1


def test_a_rank_that_failed_before_a_server_is_the_root_cause() -> None:
    assert verdict_on(raised(1), server_exited(0, -9)).root_cause == "rank 1"


def test_a_server_that_is_started_again_fails_no_run_by_itself() -> None:
    restarted = server_exited(1, -9, is_restarted=True)
    assert attribute_failure([restarted]) is None
    assert verdict_on(restarted, raised(0)).root_cause == "rank 0"
    assert verdict_on(restarted, left(0, 4), raised(1, LOST_SERVER)).root_cause == "rank 0"
    other = server_exited(0, -9, is_restarted=True)
    for records in ([other, restarted, raised(0, LOST_SERVER)], [raised(0, LOST_SERVER), other, restarted]):
        verdict = verdict_on(*records)
        assert (verdict.root_cause, verdict.exit_code) == ("server 1", 137)
        assert verdict.headline == "was killed by signal 9 (SIGKILL), was started again, and rank 0 could not continue"
    ended = server_exited(1, 5, is_restarted=True)
    assert verdict_on(ended, raised(0, LOST_SERVER)).headline.startswith("ended with exit code 5, was started again,")
    assert verdict_on(restarted, server_exited(1, -6, note=", and did not serve")).headline == (
        "was killed by signal 6 (SIGABRT), and did not serve"
    )


def test_a_server_that_ends_after_all_workers_have_succeeded_is_no_failure() -> None:
    started = [Started(rank=rank, time_ns=0, pid=1, log_file="") for rank in range(2)]
    ends = [exited(0, 0), exited(1, 0)]
    assert attribute_failure([*started, *ends, server_exited(0, -9)]) is None
    assert attribute_failure([*started, server_exited(0, -9), *ends]) is None
    for records in ([*started, ends[0], server_exited(0, -9)], [*started, server_exited(0, -9), ends[0], exited(1, 1)]):
        assert verdict_on(*records).root_cause == "server 0"


def test_a_worker_without_its_server_gets_a_line_that_says_so() -> None:
    failure = describe_secondary_failure(raised(0, LOST_SERVER))
    assert failure.text == "lost its connection to a server"


def survived(rank: int, code: int) -> Exited:
    return Exited(rank=rank, time_ns=0, exit_code=code, survivors=1)


def test_a_lost_worker_is_the_root_cause_only_if_another_one_cannot_go_on():
    before = [survived(1, -9)]
    assert attribute_failure(before) is None
    verdict = attribute_failure([*before, raised(0, LOST)])
    assert verdict is not None
    assert (verdict.root_cause_rank, verdict.exit_code) == (1, 137)
    assert "was killed by signal 9 (SIGKILL), and rank 0 could not continue without it" in verdict.headline
    own = attribute_failure([*before, raised(0)])
    assert own is not None
    assert (own.root_cause_rank, own.cause) == (0, "raised")


def test_the_error_in_the_callback_of_a_future_is_named_instead_of_the_futures() -> None:
    inner = "CollectiveError: \nexpected: rank 1 to match the call of rank 0\n\nAt:\n  operation_queue.py(128): take\n"
    prefix = "Got the following error when running the callback: "
    verdict = verdict_on(raised(0, f"{prefix}RuntimeError: {prefix}{inner}"), left(0, 1))
    assert verdict.headline == "raised CollectiveError: expected: rank 1 to match the call of rank 0"
