"""The fault matrix: after any fault the job ends everywhere, names the root cause, and leaves no process.

With FAULTS_JSON=FILE each case adds a row to FILE, for docs/faults.md (`make soak`). Times are published, not judged,
but for a bound far above the goal: a busy machine must not fail a test.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_list import FAULTS
from faults import Fault, make_row, measure_fault, restore_link
from support.hosts import Hosts, two_hosts

pytestmark = pytest.mark.slow

SAMPLE = {
    ("raises", 1, 1),
    ("leaves its group, cleans up for a second, then raises", 2, 1),
    ("raises while others hold the interpreter lock", 4, 1),
    ("segfaults", 2, 1),
    ("raises while others ignore signals", 1, 2),
    ("raises, and a daemon in a session of its own is left", 1, 2),
    ("is killed", 2, 2),
    ("is stopped (SIGSTOP), and the others wait for it (--hang-timeout 4)", 1, 2),
    ("host 0 loses its power", 1, 2),
}
CASES = [
    pytest.param(
        fault,
        workers,
        hosts,
        id=f"{fault.name}-{workers} workers-{hosts} hosts",
        marks=[] if (fault.name, workers, hosts) in SAMPLE else [pytest.mark.exhaustive],
    )
    for fault in FAULTS
    for hosts in fault.hosts
    for workers in (1, 2, 4)
    if workers * hosts >= fault.least_workers
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("fault", "workers", "host_count"), CASES)
def test_the_job_ends_names_the_root_cause_and_leaves_no_process(
    fault: Fault, workers: int, host_count: int, tmp_path: Path, request: pytest.FixtureRequest
):
    hosts = request.getfixturevalue("hosts") if host_count == 2 else None
    with restore_link(hosts):
        found = measure_fault(fault, workers=workers, folder=tmp_path, hosts=hosts)
    if "FAULTS_JSON" in os.environ:
        with open(os.environ["FAULTS_JSON"], "a") as rows:
            rows.write(json.dumps(make_row(found) | {"goal": fault.limit_seconds}) + "\n")
    assert found.is_right, found.report
    assert found.orphans == 0
    assert found.lines <= 14 + max(1, workers * host_count - 1), found.report  # each rank that fails later has a line
    assert found.seconds < fault.limit_seconds + 10


@pytest.mark.ci_sample(3)
def test_the_sample_that_ci_runs_is_of_the_matrix():
    assert {(fault.name, workers, hosts) for fault, workers, hosts in (case.values for case in CASES)} >= SAMPLE
    assert len(FAULTS) >= 30
