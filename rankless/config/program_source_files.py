"""Reads the source of a user's program without running it."""

import ast
import hashlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from rankless.config.run_config import Program

MOST_FILES = 100
_RANKS = re.compile(rb"rank(?!less)|is_main|main_process|process_index", re.IGNORECASE)


class SourceFile(NamedTuple):
    """A file of a program, or the code of `-c`."""

    path: str
    root: str
    """The folder in which Python looks first for what the program imports."""
    text: bytes
    tree: ast.Module | None
    """None if the text does not parse."""

    def has_beside(self, package: str) -> bool:
        """Return whether a module or package that the file may import lies beside the program."""
        return _module_file(package, [self.root]) is not None


def program_file(program: Program) -> str | None:
    """Return the Python file that runs first, or None if there is no source to read."""
    if program.kind == "script":
        return program.target if os.path.isfile(program.target) else None
    return _module_file(program.target, [os.getcwd(), *sys.path], runs=True) if program.kind == "module" else None


def names_rankless(program: Program) -> bool:
    """Whether the text of the program, or of what it imports from beside it, names Rankless."""
    return names_word(program, "rankless")


def names_word(program: Program, word: str) -> bool:
    """Whether the text of the program, or of what it imports from beside it, has this word."""
    return any(word.encode() in file.text for file in own_files(program))


def names_ranks(program: Program) -> bool:
    """Whether the text of the program, or of what it imports from beside it, tells ranks from each other."""
    return any(_RANKS.search(file.text) for file in own_files(program))


def digest_source(program: Program) -> str:
    """Return the SHA-256 of the texts of the program's first file and of the files beside it that it imports."""
    digest = hashlib.sha256()
    for file in own_files(program):
        digest.update(hashlib.sha256(file.text).digest())
    return digest.hexdigest()


def own_syntax(program: Program) -> Iterator[ast.Module]:
    """Yield the syntax trees of the program's first file and of the files beside it that it imports.

    Files that do not parse are skipped. Nothing is imported, because a package's code could do anything.
    """
    return (file.tree for file in own_files(program) if file.tree is not None)


def own_files(program: Program) -> Iterator[SourceFile]:
    """Yield the first file, or the code of `-c`, then the files beside it that it imports."""
    first = "" if program.kind == "code" else program_file(program)
    if first is None:
        return
    # Where Python looks first: beside a script, and in the current folder for a module or code.
    root = os.path.dirname(os.path.realpath(first)) if program.kind == "script" else os.getcwd()
    waiting, known = [first], {os.path.realpath(first)}
    while waiting:
        path = waiting.pop(0)
        text = _text(path) if path else program.target.encode()
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            yield SourceFile(path, root, text, None)
            continue
        yield SourceFile(path, root, text, tree)
        for found in _imported(tree, path, root):
            if os.path.realpath(found) not in known and len(known) < MOST_FILES:
                known.add(os.path.realpath(found))
                waiting.append(found)


def _imported(tree: ast.Module, path: str, root: str) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        base = root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = os.path.join(os.path.dirname(path), *[os.pardir] * (node.level - 1))
            start = [node.module] if node.module else []
            names = [*start, *(".".join([*start, alias.name]) for alias in node.names)]
        for name in names:
            found = _module_file(name, [base])
            if found is not None:
                yield found


def _module_file(name: str, path: list[str], *, runs: bool = False) -> str | None:
    """Return the source file of a module found on `path`; with `runs`, the file that `python -m` runs."""
    parts, folders = name.split("."), path
    found = None
    for number in range(len(parts)):
        try:
            found = importlib.machinery.PathFinder.find_spec(".".join(parts[: number + 1]), folders)
        except (ImportError, ValueError):
            return None
        if found is None:
            return None
        folders = list(found.submodule_search_locations or [])
        if not folders and number + 1 < len(parts):
            return None
    for folder in folders if runs else ():
        main = os.path.join(folder, "__main__.py")
        if os.path.isfile(main):
            return main
    origin = None if found is None else found.origin
    return origin if origin is not None and origin.endswith(".py") else None


def _text(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
