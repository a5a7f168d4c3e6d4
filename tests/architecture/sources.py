"""The project's own files, parsed once for the architecture tests."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rankless"


def python_files(*folders: str) -> list[Path]:
    """Every Python file of ours under `folders` of the repository; not the scripts that tests run as users' own."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")) if not is_a_users(file)]
    assert files, f"no Python file under {folders}: the test looks in the wrong place"
    return files


def is_a_users(file: Path) -> bool:
    """Whether a file is written as a user would, whose style is not ours to rule."""
    folders = (ROOT / "tests" / "scripts", ROOT / "tests" / "logical" / "scripts")
    is_peer = file.parent.parent == ROOT / "tests" / "logical" / "peers"
    return (file.parent in folders or is_peer) and not file.name.startswith("test_")


@functools.cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of `file`."""
    return ast.parse(file.read_text(), filename=str(file))


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of the syntax tree of `file`: a walk through all files takes seconds."""
    return list(ast.walk(parsed(file)))


def short(file: Path) -> str:
    """The path of `file` as the exception lists spell it."""
    return file.relative_to(ROOT).as_posix()
