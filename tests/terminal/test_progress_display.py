import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rankless.records.events import Progress
from rankless.terminal.cursor_tracker import CursorTracker
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


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("output", "is_inside_line", "draws"),
    [
        (b"a line\n", False, False),
        (b"a line\r\n", False, False),
        (b"\x1b[1ma line\x1b[0m\n\x1b[0m", False, False),
        (b"loss: ", True, False),
        (b"\r 10%|#         | 1/10", True, True),
        (b"\r100%|##########| 10/10\n", False, True),
        (b"\n\r 10%|#  | 1/10\x1b[A", True, True),
        (b"\x1b[2K\x1b[1A", True, True),
        (b"...\x08\x08", True, True),
    ],
)
def test_the_cursor_is_where_the_output_has_left_it_wherever_it_is_cut(output, is_inside_line, draws):
    for cut in range(len(output)):
        clock = Clock()
        cursor = CursorTracker(clock=clock)
        cursor.feed(b"before\n")
        for part in (output[:cut], output[cut:]):
            cursor.feed(part)
        assert cursor.is_inside_line == is_inside_line
        assert cursor.is_free == (not is_inside_line and not draws)
        clock.now += 2
        assert cursor.is_free == (not is_inside_line)


def test_the_display_waits_for_the_end_of_a_scripts_line_and_of_its_bars():
    file, clock = io.StringIO(), Clock()
    cursor = CursorTracker(clock=clock)
    display = ProgressDisplay(file, clock=clock, cursor=cursor)
    cursor.feed(b"loss: ")
    display.show(progress_at(1))
    display.show(progress_at(15))
    assert file.getvalue() == ""
    cursor.feed(b"0.5\n")
    clock.now += 10
    display.show(progress_at(2))
    cursor.feed(b"\r100%|####|\n")
    clock.now += 0.5
    display.show(progress_at(15))
    assert [line.split()[3] for line in file.getvalue().splitlines()] == ["15/15"]
    clock.now += 1
    display.show(progress_at(3))
    assert [line.split()[3] for line in file.getvalue().splitlines()] == ["15/15", "15/15"]


TERMINAL_SCRIPT = """
import sys
from rankless.terminal.cursor_tracker import CursorTracker
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
from rankless.terminal.cursor_tracker import CursorTracker
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
            elif output[end] == "J":
                lines[row:] = [lines[row][:column]]
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


def run_on_a_terminal(*arguments: str, folder: Path | None = None) -> str:
    ours, theirs = pty.openpty()
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder
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
    screen = [line for line in screen_after(run_on_a_terminal("-c", TERMINAL_SCRIPT)) if line]
    assert screen[:2] == ["from a worker", "from the script"]
    assert len(screen) == 3
    assert screen[2].startswith("epoch 1")
    assert screen[2].endswith("step 3/3  loss 0.5000  80 samples/s  0:01 left")


@pytest.mark.slow
def test_a_killed_process_leaves_the_cursor_visible():
    output = run_on_a_terminal("-c", KILLED_SCRIPT)
    assert "step 1/3" in output
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


BARS_SCRIPT = """
import time, torch, rankless
from tqdm import tqdm
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model = torch.nn.Linear(4, 1)
@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(x):
    return model(x).square().mean()
loader = rankless.loader(data, batch_size=8)
def epoch(**options):
    for (x,) in tqdm(loader, ncols=60, mininterval=0, **options):
        train(x)
        time.sleep(0.05)
print("one bar")
epoch(desc="single")
print("nested bars")
for _ in tqdm(range(2), desc="outer", ncols=60, mininterval=0):
    epoch(desc="inner", leave=False)
print("words:", end=" ", flush=True)
for (x,) in loader:
    train(x)
    print("w", end="", flush=True)
    time.sleep(0.05)
print(".")
open("shared", "w").write("x")
bar = tqdm(total=3, desc="last", ncols=60)
for _ in range(3):
    bar.update()
    time.sleep(0.2)
raise SystemExit(0)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bars_of_the_script_the_progress_line_and_the_agents_lines_do_not_tear_each_other(tmp_path):
    (tmp_path / "bars.py").write_text(BARS_SCRIPT)
    output = run_on_a_terminal("-m", "rankless", "run", "-n", "2", "--devices", "cpu", "bars.py", folder=tmp_path)
    screen = [line for line in screen_after(output) if line]
    first = screen.index("one bar")
    assert [line.partition("%")[0] for line in screen[first : first + 4]] == [
        "one bar",
        "single: 100",
        "nested bars",
        "outer: 100",
    ]
    assert screen[first + 4] == "words: wwwwwwww."
    torn = [line for line in screen if ("epoch" in line or "rankless:" in line) and ("%|" in line or "words" in line)]
    assert torn == []
    assert any(line.startswith("last: 100%|") for line in screen)
    assert screen[-1].startswith("rankless: done in ")
