"""The scripts of three guides, from-torch.md, from-fsdp2.md and from-accelerate.md: before and after.

Before under torchrun and after under Rankless are the same training.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.warm_runs import rankless

DOCS = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(# (\w+)\.py\n.*?)^```$", re.DOTALL | re.MULTILINE)
SCRIPTS = {
    name: text
    for page in ("from-torch", "from-fsdp2", "from-accelerate")
    for text, name in BLOCK.findall((DOCS / f"{page}.md").read_text())
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RANKLESS = ("run", "-n", "2")
# What no_sync does in the row on accumulation, in the script of the page.
STEP = """        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
ACCUMULATED_STEP = """        calls += 1
        if calls % 4:
            with model.no_sync():
                (loss / 4).backward()
        else:
            (loss / 4).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""


def printed(name: str, text: str, *launcher: str, folder: Path) -> list[tuple[float, int]]:
    """Loss and hits of each epoch, as a script of this text prints them."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    if launcher == RANKLESS:
        done = rankless(*launcher, f"{name}.py", folder=folder)
    else:
        command = [sys.executable, *launcher, f"{name}.py"]
        for _ in range(3):  # a process of plain torch under torchrun may abort when it ends
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
            if "SIGABRT" not in done.stderr:
                break
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^epoch \d: loss (\S+), (\d+) of \d+ right$", done.stdout, re.MULTILINE)
    assert len(lines) == 3, done.stdout
    return [(float(loss), int(hits)) for loss, hits in lines]


def require_equal(found: list[tuple[float, int]], wanted: list[tuple[float, int]]) -> None:
    assert [hits for _, hits in found] == [hits for _, hits in wanted]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-11)


def convert(folder: Path) -> dict[str, torch.Tensor]:
    """The states of a checkpoint of torch.distributed.checkpoint, after the script of the page has converted it."""
    (folder / "convert_fsdp2.py").write_text(SCRIPTS["convert_fsdp2"])
    done = subprocess.run([sys.executable, "convert_fsdp2.py"], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return read_states(folder)


def read_states(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model and an optimizer in a checkpoint that one worker has written."""
    (file,) = (folder / "checkpoint").glob("*.safetensors")
    return {name: value for name, value in load_file(file).items() if name.startswith(("model.", "optimizer."))}


def require_equal_states(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert len(found) == 8 * 4  # each parameter has two moments and a number of steps
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("system", ["torch", "fsdp2", "accelerate"])
def test_before_and_after_are_the_same_training(system: str, tmp_path: Path):
    before, after = f"before_{system}", f"after_{system}"
    wanted = printed(before, SCRIPTS[before], *TORCHRUN, folder=tmp_path / "before")
    assert wanted[0][0] > wanted[2][0] > 0
    require_equal(printed(after, SCRIPTS[after], *RANKLESS, folder=tmp_path / "two"), wanted)
    require_equal(printed(after, SCRIPTS[after], folder=tmp_path / "one"), wanted)
    if system == "torch":
        there, here = (torch.load(tmp_path / folder / "digits.pt") for folder in ("before", "two"))
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
    if system == "fsdp2":
        require_equal_states(convert(tmp_path / "before"), read_states(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_sync_in_three_calls_of_four_is_accumulate_4(tmp_path: Path):
    before, after = SCRIPTS["before_torch"], SCRIPTS["after_torch"]
    assert before.count(STEP) == after.count("clip_norm=1.0") == 1
    before = before.replace(STEP, ACCUMULATED_STEP).replace("for epoch in", "calls = 0\nfor epoch in")
    after = after.replace("clip_norm=1.0", "accumulate=4, clip_norm=1.0")
    wanted = printed("before", before, *TORCHRUN, folder=tmp_path / "before")
    require_equal(printed("after", after, *RANKLESS, folder=tmp_path / "after"), wanted)


def test_every_script_of_the_pages_has_a_counterpart():
    systems = ("torch", "fsdp2", "accelerate")
    pairs = {f"{when}_{system}" for when in ("before", "after") for system in systems}
    assert set(SCRIPTS) == pairs | {"convert_fsdp2"}
    assert sum((DOCS / f"from-{page}.md").read_text().count("```python") for page in systems) == len(SCRIPTS)
