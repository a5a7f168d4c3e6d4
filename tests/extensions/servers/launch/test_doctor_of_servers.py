"""The doctor's check of parameter servers."""

import os
import re

import pytest
from support.jobs import job_environment

from rankless.extensions.servers.launch import options, server_checks
from rankless.extensions.servers.launch.server_checks import run_check


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_server_makes_a_step_and_goes_on_after_a_kill():
    found = run_check()
    assert found.status == "pass", found
    assert re.fullmatch(r"a step after [\d.]+ \w+; after a kill it continued in [\d.]+ \w+", found.seen)


@pytest.mark.slow
def test_a_server_that_cannot_start_is_a_failure_with_its_reason(monkeypatch, tmp_path):
    program = (
        "import sys\nif 'rankless.extensions.servers.service.process' in ' '.join(sys.orig_argv): sys.exit('no core')"
    )
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), job_environment({}).get("PYTHONPATH", "")]))
    found = run_check()
    assert found.status == "fail", found
    assert re.fullmatch(r"the server: it ended with exit code 1 .*: SystemExit: no core", found.seen)
    assert "server0.log" in found.fix


def test_a_server_that_does_not_answer_is_a_failure(monkeypatch):
    monkeypatch.setattr(server_checks, "TIMEOUT_SECONDS", 0.01)
    found = run_check()
    assert (found.status, found.seen) == ("fail", "not finished within 0.01 s")


def test_missing_packages_are_no_failure(monkeypatch):
    monkeypatch.setattr(options, "SERVER_PACKAGES", ("zmq", "no_such_package"))
    found = run_check()
    assert found.status == "pass"
    assert found.seen.startswith("no no_such_package; runs with --servers need pip install")
