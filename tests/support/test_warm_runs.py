"""Runs of commands within the test process."""

import pytest
from support.warm_runs import run_script


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("preload", [(), ("tabnanny",)])
def test_a_pool_imports_further_modules_before_it_forks(tmp_path, preload):
    script = "import sys, rankless\nprint('tabnanny' in sys.modules)"
    found = run_script(script, "-q", folder=tmp_path, preload=preload)
    assert found.stdout == f"{bool(preload)}\n", found.stderr
