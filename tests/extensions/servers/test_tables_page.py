"""The guide to tables and the examples in docstrings do what they say."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.jobs import job_environment
from support.warm_runs import rankless as rankless_command

import rankless
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table
from rankless.parameter_server import Embedding

PAGE = Path(__file__).parents[3] / "docs/guides/tables.md"
NAMES = {
    "np": np,
    "rankless": rankless,
    "torch": torch,
    "SgdSettings": SgdSettings,
    "Table": Table,
    "TableSettings": TableSettings,
}


@pytest.mark.exhaustive
def test_the_script_of_the_guide_prints_what_the_guide_says(tmp_path):
    text = PAGE.read_text()
    script, printed = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "text"))
    (tmp_path / "recommend.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "recommend.py"], cwd=tmp_path, env=job_environment({}), capture_output=True, text=True
    )
    assert done.stdout == printed, done.stderr


@pytest.mark.exhaustive
def test_the_commands_of_the_guide_run_its_shared_script(tmp_path):
    page = PAGE.read_text()
    script = next(
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if text.startswith("# shared.py")
    )
    (tmp_path / "shared.py").write_text(script)
    commands = re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert [command.split()[0] for command in commands] == ["python", "rankless", "rankless", "rankless"]
    for command in commands[1:]:
        done = rankless_command(*command.split()[1:], folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in done.stdout


@pytest.mark.parametrize("documented", [Embedding, Table, rankless.errors.TableError])
def test_the_example_of_a_docstring_works(documented):
    parser, output = doctest.DocTestParser(), []
    example = parser.get_doctest(documented.__doc__, dict(NAMES), documented.__name__, None, None)
    assert example.examples
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=output.append)
    assert not output, "".join(output)
