"""The directive `command-reference`: every command and option of `rankless`, read from the parsers themselves."""

import argparse

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from rankless import cli


class CommandReference(SphinxDirective):
    """Renders one section per command, with its usage, its description and a table of its options."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, in the order of `rankless --help`."""
        return [self._section(name) for name in cli.summarize_commands()]

    def _section(self, name: str) -> nodes.section:
        parser = cli.make_parser(name)
        section = nodes.section(ids=[f"rankless-{name}"])
        section += nodes.title(text=f"rankless {name}")
        section += nodes.paragraph(text=sentence(cli.summarize_commands()[name]))
        usage = parser.format_usage().removeprefix("usage: ").strip()
        section += nodes.literal_block(usage, usage, language="text")
        section += options_table(parser)
        return section


def sentence(text: str) -> str:
    """Return a help text as a sentence."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def options_table(parser: argparse.ArgumentParser) -> nodes.table:
    """Return the options and arguments of a parser as a table of two columns."""
    table = nodes.table()
    group = nodes.tgroup(cols=2)
    group += [nodes.colspec(colwidth=35), nodes.colspec(colwidth=65)]
    head, body = nodes.thead(), nodes.tbody()
    head += row(nodes.paragraph(text="option"), nodes.paragraph(text="what it does"))
    formatter = argparse.HelpFormatter(prog=parser.prog)
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            name = nodes.literal(text=formatter._format_action_invocation(action))
            text = formatter._expand_help(action) if action.help else ""
            body += row(nodes.paragraph("", "", name), nodes.paragraph(text=text))
    group += [head, body]
    table += group
    return table


def row(*cells: nodes.Node) -> nodes.row:
    """Return a table row of the given cells."""
    made = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += cell
        made += entry
    return made


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True}
