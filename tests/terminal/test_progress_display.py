import io
import os
import pty
import subprocess
import sys

import pytest

from rankless.records.events import Progress
from rankless.terminal.progress_display import ProgressDisplay, format_progress


def progress_at(step: int, *, loss: float | None = 0.523, steps: int | None = 15, **fields) -> Progress:
    values = {"samples_per_second": 8140.2, "seconds_left": 0.0, "last_of_epoch": step == steps}
    return Progress(
        rank=0,
        time_ns=0,
        job="train",
        epoch=1,
        step=step,
        steps_per_epoch=steps,
        loss=loss,
        **(values | fields),
    )


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (progress_at(15), "epoch 1  step 15/15  loss 0.5230  8,140 samples/s  0:00 left"),
        (progress_at(3, steps=None, seconds_left=None), "epoch 1  step 3  loss 0.5230  8,140 samples/s"),
        (progress_at(3, loss=None, seconds_left=3671.2), "epoch 1  step 3/15  8,140 samples/s  1:01:11 left"),
        (progress_at(3, loss=2e-5, samples_per_second=0.0), "epoch 1  step 3/15  loss 2.000e-05  0:00 left"),
        (
            progress_at(3, loss=float("nan"), samples_per_second=1.5),
            "epoch 1  step 3/15  loss nan  1.5 samples/s  0:00 left",
        ),
    ],
)
def test_a_plain_line_shows_the_known_fields(progress, line):
    assert format_progress(progress) == line


def test_piped_lines_appear_every_five_seconds_and_at_an_epochs_end():
    now = [100.0]
    file = io.StringIO()
    display = ProgressDisplay(file, clock=lambda: now[0])
    for step, time in [(1, 100.0), (2, 104.9), (3, 105.0), (4, 106.0), (15, 107.0)]:
        now[0] = time
        display.show(progress_at(step))
    steps = [line.split("step ")[1].split("/")[0] for line in file.getvalue().splitlines()]
    assert steps == ["1", "3", "15"]


def test_piped_lines_have_no_control_characters():
    file = io.StringIO()
    display = ProgressDisplay(file)
    with display.hidden():
        file.write("a user's line\n")
    display.show(progress_at(15))
    display.close()
    assert file.getvalue() == "a user's line\n" + format_progress(progress_at(15)) + "\n"


TERMINAL_SCRIPT = """
import sys
from rankless.terminal.progress_display import ProgressDisplay
from rankless.records.events import Progress

def at(step):
    return Progress(rank=0, time_ns=0, job="train", epoch=1, step=step, steps_per_epoch=3, loss=0.5,
                    samples_per_second=80.0, seconds_left=1.0, last_of_epoch=step == 3)

display = ProgressDisplay()
display.show(at(1))
with display.hidden():
    sys.stdout.write("from a worker\\n")
    sys.stdout.flush()
display.show(at(2))
print("from the script")
display.show(at(3))
display.close()
"""

KILLED_SCRIPT = """
import os
from rankless.terminal.progress_display import ProgressDisplay
from rankless.records.events import Progress

ProgressDisplay().show(Progress(rank=0, time_ns=0, job="train", epoch=1, step=1, steps_per_epoch=3, loss=0.5,
                                samples_per_second=80.0, seconds_left=1.0))
os._exit(0)
"""


def screen_after(output: str) -> list[str]:
    """The lines that a terminal shows: carriage returns, erased lines and cursor-up obeyed, no more."""
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(output):
        character = output[position]
        if output.startswith("\x1b[", position):
            end = position + 2
            while not output[end].isalpha():
                end += 1
            if output[end] == "K":
                lines[row] = ""
            elif output[end] == "A":
                row -= int(output[position + 2 : end] or 1)
            position = end
        elif character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
        position += 1
    return [line.rstrip() for line in lines]


def run_on_a_terminal(script: str) -> str:
    ours, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    assert process.wait(timeout=30) == 0, output.decode()
    return output.decode()


@pytest.mark.slow
def test_on_a_terminal_other_text_appears_whole_above_the_line():
    screen = [line for line in screen_after(run_on_a_terminal(TERMINAL_SCRIPT)) if line]
    assert screen[:2] == ["from a worker", "from the script"]
    assert len(screen) == 3
    assert screen[2].startswith("epoch 1")
    assert screen[2].endswith("step 3/3  loss 0.5000  80 samples/s  0:01 left")


@pytest.mark.slow
def test_a_killed_process_leaves_the_cursor_visible():
    output = run_on_a_terminal(KILLED_SCRIPT)
    assert "step 1/3" in output
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")
