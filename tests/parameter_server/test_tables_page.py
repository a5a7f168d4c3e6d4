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

import rankless
from rankless.parameter_server import Embedding
from rankless.parameter_server.tables.optimizers import SgdSettings
from rankless.parameter_server.tables.settings import TableSettings
from rankless.parameter_server.tables.table import Table

PAGE = Path(__file__).parents[2] / "docs/guides/tables.md"
NAMES = {
    "np": np,
    "rankless": rankless,
    "torch": torch,
    "SgdSettings": SgdSettings,
    "Table": Table,
    "TableSettings": TableSettings,
}


def test_the_script_of_the_guide_prints_what_the_guide_says(tmp_path):
    text = PAGE.read_text()
    script, printed = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "text"))
    (tmp_path / "recommend.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "recommend.py"], cwd=tmp_path, env=job_environment({}), capture_output=True, text=True
    )
    assert done.stdout == printed, done.stderr


@pytest.mark.parametrize("documented", [Embedding, Table, rankless.errors.TableError])
def test_the_example_of_a_docstring_works(documented):
    parser, output = doctest.DocTestParser(), []
    example = parser.get_doctest(documented.__doc__, dict(NAMES), documented.__name__, None, None)
    assert example.examples
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=output.append)
    assert not output, "".join(output)
