"""The page of environment variables and exit codes is complete: it is compared with the source."""

import ast
import re
from pathlib import Path

from rankless.cli import summarize_commands
from rankless.config import environment, extensions
from rankless.extensions.servers import config

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "environment.md").read_text()
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK")
NEITHER_READ_NOR_SET = {*environment._HOST_SPECIFIC, *environment._SET_BY_COMPILER}
"""Variables that Rankless only leaves out of what it sends to other hosts, or out of a warning."""


def named_variables() -> set[str]:
    """Return the names of variables among the texts of the files that read the environment, and those of extensions."""
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (environment, config)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    declared = {alias.variable for alias in extensions.list_aliases().values()}
    declared |= {each.launched.variable for each in extensions.list_extensions() if each.launched is not None}
    own = {
        text
        for file in extensions.FOLDER.rglob("*.py")
        for text in re.findall(r'"(RANKLESS_[A-Z_]+)"', file.read_text())
    }
    return {text for text in texts if VARIABLE.fullmatch(text)} - NEITHER_READ_NOR_SET | declared | own


def test_the_page_names_every_variable_that_is_read_or_set():
    found = named_variables()
    assert {"RANKLESS_HANG_TIMEOUT", "RANKLESS_PRELOAD", "CUDA_VISIBLE_DEVICES", "RANK"} <= found
    assert sorted(name for name in found if f"`{name}" not in PAGE) == []


def test_every_variable_of_rankless_on_the_page_exists():
    assert set(re.findall(r"RANKLESS_[A-Z_]+\b(?<!_)", PAGE)) <= named_variables()


def test_the_page_has_the_exit_codes_of_every_command():
    table = PAGE.partition("## Exit codes")[2]
    assert [name for name in summarize_commands() if f"`{name}`" not in table] == []
