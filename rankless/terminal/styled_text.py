"""Text with a color, where the terminal shows colors."""

import sys

from rich.console import Console


def print_colored(text: str, style: str) -> None:
    """Print text in a style such as "bold green" on a terminal, and plainly elsewhere or if NO_COLOR is set."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(text, style=style, markup=False)
