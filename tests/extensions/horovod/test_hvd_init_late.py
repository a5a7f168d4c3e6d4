"""A rank does not call hvd.init: the others raise an error that names it."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
import horovod.torch as hvd
if os.environ["RANK"] == "1":
    time.sleep(600)
hvd.init()
"""


@pytest.mark.exhaustive
def test_a_rank_that_does_not_call_init_is_named_with_a_fix(tmp_path: Path):
    done = run_script(SCRIPT, "-n", "2", "--show", "all", folder=tmp_path, HOROVOD_START_TIMEOUT="1")
    assert done.returncode == 1
    for text in ("expected: every process of the job to call hvd.init()", "rank 1 did not call it within 1 s", "fix:"):
        assert text in done.stderr
