"""The directive `error-catalogue`: every error of `rankless.errors`, with where it is raised and its fixes.

The catalogue reads the source: each place that raises one of the errors, with its `fix=`.
"""

import ast
import inspect
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import rankless
from rankless import errors

PACKAGE = Path(rankless.__file__).parent


class ErrorCatalogue(SphinxDirective):
    """Renders one section per error class, with its docstring and a table of expectations and fixes."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, in the order of the classes in `rankless.errors`."""
        places = raised_errors()
        return [section_of(name, places[name]) for name in error_names()]


def error_names() -> list[str]:
    """Return the names of the error classes, in the order of their definition."""
    found = [
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)
    ]
    return [name for name in found if getattr(errors, name).__module__ == errors.__name__]


def raised_errors() -> dict[str, set[tuple[str, str]]]:
    """Return what each error expects and how it is fixed, as the package's source says."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in error_names():
                keywords = {keyword.arg: template(keyword.value) for keyword in node.keywords}
                if keywords.get("expected") and keywords.get("fix"):
                    found[node.func.id].add((keywords["expected"], keywords["fix"]))
    return found


def template(value: ast.expr) -> str:
    """Return a text with `…` for each value that is only known when the error is raised; "" if it is no text."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in value.values)
    return ""


def section_of(name: str, places: set[tuple[str, str]]) -> nodes.section:
    """Return the section of one error."""
    section = nodes.section(ids=[f"error-{name.lower()}"])
    section += nodes.title(text=name)
    for paragraph in (inspect.getdoc(getattr(errors, name)) or "").split("\n\n"):
        section += nodes.paragraph(text=paragraph.replace("\n", " "))
    if places:
        section += table_of(sorted(places))
    return section


def table_of(places: list[tuple[str, str]]) -> nodes.table:
    """Return a table of what was expected and how it is fixed."""
    table = nodes.table()
    group = nodes.tgroup(cols=2)
    group += [nodes.colspec(colwidth=50), nodes.colspec(colwidth=50)]
    head, body = nodes.thead(), nodes.tbody()
    for target, rows in ((head, [("expected", "fix")]), (body, places)):
        for cells in rows:
            line = nodes.row()
            for text in cells:
                entry = nodes.entry()
                entry += nodes.paragraph(text=text)
                line += entry
            target += line
    group += [head, body]
    table += group
    return table


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("error-catalogue", ErrorCatalogue)
    return {"parallel_read_safe": True}
