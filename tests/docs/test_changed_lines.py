"""The table of changed lines: five plain scripts beside the same ones written for other systems.

Each version changes what its system's own guide asks for, in as few lines as it can: models, optimizers and loaders are
set up for ranks, values of an evaluation cover all samples, and one rank prints and writes. Batch sizes, learning
rates, seeds and devices stay.
"""

import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from support.warm_runs import rankless

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "tests/logical/scripts"
PEERS = ROOT / "tests/logical/peers"
SYSTEMS = ("accelerate", "fabric", "ddp", "horovod")
SCRIPTS = {"CNN": "digits_cnn", "GPT": "char_gpt", "VAE": "vae", "GAN": "dcgan", "GPT-2": "gpt2_training"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def read_lines(script: Path) -> list[str]:
    """Return the lines of a script without indentation, blank lines and comments."""
    lines = [line.strip() for line in script.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def count_changed(before: list[str], after: list[str]) -> int:
    """Return how many lines one of two scripts has and the other lacks, in order. An edited line counts twice."""
    equal = sum(block.size for block in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks())
    return len(before) + len(after) - 2 * equal


def read_table(page: Path) -> dict[str, list[int]]:
    """Return the numbers of the rows of a page's table of changed lines, by script."""
    rows = re.findall(r"^\|.*?\b(CNN|GPT-2|GPT|VAE|GAN)\b.*?\|((?: \d+ \|){5})$", page.read_text(), re.MULTILINE)
    return {name: [int(number) for number in re.findall(r"\d+", numbers)] for name, numbers in rows}


def test_the_count_leaves_out_indentation_and_counts_edits_twice() -> None:
    before = ["a", "b", "c"]
    assert count_changed(before, before) == 0
    assert count_changed(before, ["a", "if rank == 0:", "b", "c"]) == 1
    assert count_changed(before, ["a", "B", "c"]) == 2
    assert count_changed(before, ["a", "c"]) == 1


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/guides/loop-to-job.md"])
def test_the_table_has_the_counted_lines(page: str) -> None:
    table = read_table(ROOT / page)
    assert list(table) == list(SCRIPTS)
    for name, script in SCRIPTS.items():
        before = read_lines(PLAIN / f"{script}.py")
        versions = [read_lines(PEERS / system / f"{script}.py") for system in SYSTEMS]
        assert table[name] == [0, *(count_changed(before, after) for after in versions)], name


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("script", SCRIPTS.values())
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_version_for_another_system_trains(system: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    command = [sys.executable, str(PLAIN / f"{script}.py")]
    one = subprocess.run(command, cwd=tmp_path / "one", capture_output=True, text=True, timeout=300)
    assert one.returncode == 0, one.stderr
    version = str(PEERS / system / f"{script}.py")
    if system == "horovod":
        done = rankless("run", "-n", "2", "--no-progress", version, folder=tmp_path)
    else:
        command = [sys.executable, *TORCHRUN, version]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # Batches of two processes are half as many. Each line appears once, not once for each process.
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[transformers]")]  # on standard error
    wanted = one.stdout.splitlines()
    assert len(wanted) / 2 <= len(printed) <= len(wanted), done.stdout
    assert printed[0].split()[0] == wanted[0].split()[0]
    written = {file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*.pt*")}
    assert all((tmp_path / file).is_file() for file in written)
