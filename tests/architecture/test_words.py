"""Phrases that the prose of the project avoids: passive telling, headless clauses, and metaphors."""

import ast
import re
from pathlib import Path

import pytest
from architecture.sources import ROOT, parsed, python_files

# A phrase, and a better one. Each is searched in running text, without code.
PHRASES = {
    r"\b(?:is|are|was|were) (?:said|told)\b": "name the actor: the error names, the table shows",
    r"\btold of\b": "name the actor: the terminal shows",
    r"\b(?:go|goes|going|went|gone) on\b": "continue, or in progress",
    r"\bwhat one device (?:does|trains)\b": "as one device does; equal to one device's",
    r"\bwhat each worker (?:holds|has|sends)\b": "the shards of each worker, its communication",
    r"\bwithout how many\b": "how many … the run tolerates",
    r"\bsays otherwise\b": "overrides",
    r"\bwithout a word\b": "silently",
    r"\bat last\b": "leave it out",
    r"\band its kin\b": "name them",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bprove[sdn]?\b|\bproofs?\b": "check",
    r"\bfor want of\b": "because there is no …",
    r"(?:^|[.:;] |\| |- )What (?:the|a|an|each|it|they) ": "begin with the noun: 'Tensors that …'",
    r"(?:^|[.;] |\| |- )Who [a-z]": "begin with the noun: 'Users that …'",
}
GENERATED = {"faults.md", "scoreboard.md", "soak.md", "torch-versions.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        # A decision describes the time at which it was written.
        if page.name not in GENERATED and not {"decisions", "zh"} & set(page.parts)
    ),
]


def running_text(page: Path) -> str:
    """Return a page without code, with as many lines."""
    text = re.sub(r"^```.*?^```$", lambda found: "\n" * found[0].count("\n"), page.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`]*`", lambda found: "`" + "\n" * found[0].count("\n") + "`", text)


def find_phrases(text: str) -> list[str]:
    """Return the phrases of a text with their lines and what to write instead."""
    return [
        f"line {text[: found.start()].count(chr(10)) + 1}: {' '.join(found[0].split())!r} — {instead}"
        for phrase, instead in PHRASES.items()
        for found in re.finditer(phrase.replace(" ", r"\s+"), text, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_none_of_the_phrases(page: Path):
    assert not find_phrases(running_text(page))


def test_the_docstrings_of_packages_have_none_of_the_phrases():
    files = [file for file in python_files("rankless") if file.name == "__init__.py"]
    found = {file: find_phrases(ast.get_docstring(parsed(file)) or "") for file in files}
    assert not {file: phrases for file, phrases in found.items() if phrases}


def test_the_search_finds_a_phrase_across_lines_and_leaves_code_alone(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("The run goes\non. `what goes on`\n```sh\nrun goes on\n```\n- What the rank holds is small.\n")
    assert [found.split(":")[0] for found in find_phrases(running_text(page))] == ["line 1", "line 6"]
