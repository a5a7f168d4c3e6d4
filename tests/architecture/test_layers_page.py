"""CONTRIBUTING shows the layers of the contract of `lint-imports`: `python tests/architecture/test_layers_page.py`."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
MARKS = re.compile(r"(?<=<!-- layers -->\n).*?(?=<!-- end -->)", re.DOTALL)


def summarize(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found = re.match(r'"""(.*?)(?:\.(?=\s|""")|:? *\n\n|""")', text, re.DOTALL)
    assert found, f"{module} has no docstring"
    return " ".join(found[1].split())


def make_table() -> str:
    """Return the layers as a table, from the highest to the lowest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = ["| layer | package | content |", "|---|---|---|"]
    rows += [
        f"| {number} | `{module.removeprefix('rankless.')}` | {summarize(module)} |"
        for number, layer in enumerate(layers, 1)
        for module in layer.split(" | ")
    ]
    return "\n".join([*rows, ""])


def test_the_page_has_the_layers_of_the_contract():
    assert MARKS.search(PAGE.read_text())[0] == make_table(), "run `python tests/architecture/test_layers_page.py`"


if __name__ == "__main__":
    table = make_table()
    PAGE.write_text(MARKS.sub(lambda _: table, PAGE.read_text()))
