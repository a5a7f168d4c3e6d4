"""The page of environment variables and exit codes is complete: it is compared with the source."""

import ast
import re
from pathlib import Path

from rankless.cli import COMMANDS
from rankless.config import environment, servers

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "environment.md").read_text()
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK")
ONE_HOSTS_OWN = {*environment._HOST_SPECIFIC}
"""Variables that Rankless only leaves out of what it sends to other hosts."""
FROM_HOROVOD = {"GLOO_RENDEZVOUS_ADDR"}
"""Stands in the source without its prefix HOROVOD_."""


def named_variables() -> set[str]:
    """Return the names of variables among the texts of the files that read the environment."""
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (environment, servers)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if VARIABLE.fullmatch(text)} - ONE_HOSTS_OWN


def test_the_page_names_every_variable_that_is_read_or_set():
    found = named_variables()
    assert {"RANKLESS_HANG_TIMEOUT", "RANKLESS_PRELOAD", "CUDA_VISIBLE_DEVICES", "RANK"} <= found
    documented = {f"HOROVOD_{name}" if name in FROM_HOROVOD else name for name in found}
    assert sorted(name for name in documented if f"`{name}" not in PAGE) == []


def test_every_variable_of_rankless_on_the_page_exists():
    assert set(re.findall(r"RANKLESS_[A-Z_]+\b(?<!_)", PAGE)) <= named_variables()


def test_the_page_has_the_exit_codes_of_every_command():
    table = PAGE.partition("## Exit codes")[2]
    assert [name for name in COMMANDS if f"`{name}`" not in table] == []
