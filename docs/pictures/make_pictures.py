"""Make the pictures of the documentation: run the commands on the README's scripts, and render their output as SVG.

    python docs/pictures/make_pictures.py [FOLDER]

The commands run as real processes in a pseudo-terminal of 100 columns. Seeds are fixed. The script replaces the log
folder's name and process ids and removes speeds and times, which differ between runs. The pictures use fonts of the
reader's system.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[2]
COLUMNS = 100
FONTS = '"DejaVu Sans Mono", Menlo, Consolas, "Liberation Mono", monospace'
PICTURES = {
    "terminal.svg": (
        "rankless run -n 2 --seed 1 train.py",
        "rankless verify -n 2 --seed 1 train.py",
    ),
    "program_table.svg": ("rankless plan -n 2 --seed 1 job.py",),
}
STABLE_TEXTS = (
    (re.compile(r"log/(latest|\d[\w.-]*)"), "log/latest"),
    (re.compile(r"(done) in [\d.,]+ s: (\d+ steps).*?, (logs in)"), r"\1: \2, \3"),
    (re.compile(r" +[\d.,]+ samples/s( +[\d:]+ left)?"), ""),
    (re.compile(r"^(  .*\S) +[\d.]+ m?s$"), r"\1"),
    (re.compile(r"^( +(\d+) +)\d+(?=  cpu )"), r"\g<1>4120\2"),
)
"""Patterns for the parts of the output that differ between runs, and their replacements."""


def main() -> None:
    """Write all pictures into the folder on the command line, by default this one."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent, help="Folder for the pictures.")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as work:
        for name, script in read_examples().items():
            (Path(work) / name).write_text(script)
        for name, commands in PICTURES.items():
            lines = [line for command in commands for line in record_command(command, Path(work))]
            (folder / name).write_text(render(lines, unique_id=name.removesuffix(".svg")))


def read_examples() -> dict[str, str]:
    """Return the README's script, and that which is a job, as the guide changes it, by the names of their files."""
    guide = (ROOT / "docs" / "guides" / "loop-to-job.md").read_text()
    found = re.search(r"^```diff\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert found is not None, "the guide has no diff"
    lines = found[1].splitlines()
    return {
        name: "".join(f"{line[1:]}\n" for line in lines if not line.startswith(removed))
        for name, removed in (("train.py", "+"), ("job.py", "-"))
    }


def record_command(command: str, folder: Path) -> list[str]:
    """Run a command in a pseudo-terminal and return the prompt and its final screen as lines with ANSI colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(command.split(), cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = read_all(ours)
    if process.wait() != 0:
        raise SystemExit(f"{command} failed:\n{output}")
    lines = [replace_unstable(line) for line in screen_lines(output)]
    return [f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m", *lines, ""]


def read_all(terminal: int) -> str:
    """Read a pseudo-terminal until its process ends."""
    output = b""
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # Linux reports the end of the process as an error
            piece = b""
        if not piece:
            os.close(terminal)
            return output.decode()
        output += piece


def screen_lines(output: str) -> list[str]:
    """Return the lines that a terminal shows in the end, with their colours; a progress line redraws itself."""
    lines, row, is_at_start = [""], 0, False
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r\n|\r|\n|[^\x1b\r\n]+", output):
        if token in ("\r\n", "\n"):
            row, is_at_start = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            is_at_start = True
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row = max(0, row - int(token[2:-1] or 1))
        elif token.endswith("K") and token.startswith("\x1b"):
            lines[row] = ""
        elif token.endswith("m") or not token.startswith("\x1b"):
            lines[row] = token if is_at_start else lines[row] + token
            is_at_start = False
    return [line.rstrip() for line in lines[:-1]] if not lines[-1] else lines


def replace_unstable(line: str) -> str:
    """Replace the parts of a line that differ between runs."""
    for pattern, text in STABLE_TEXTS:
        line = pattern.sub(text, line)
    return line


def wrap(line: Text, console: Console) -> list[Text]:
    """Wrap a line at words; continuation lines of a table row start at its last column."""
    column = line.plain.rstrip().rfind("  ") + 2
    if len(line) <= COLUMNS or not COLUMNS // 3 < column < COLUMNS - 10:
        return list(line.wrap(console, COLUMNS))
    head, tail = line.divide([column])
    first, *rest = tail.wrap(console, COLUMNS - column)
    return [head + first, *(Text(" " * column) + piece for piece in rest)]


def render(lines: list[str], *, unique_id: str) -> str:
    """Render lines with ANSI colours as an SVG picture of a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:  # the empty line at the end leaves room for the last line's descenders
        for piece in wrap(Text.from_ansi(line), console):
            console.print(piece, soft_wrap=True)
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code, monospace", FONTS)
    return console.export_svg(title="", theme=MONOKAI, code_format=template, unique_id=unique_id)


if __name__ == "__main__":
    main()
