"""The scripts of docs/guides/from-oneflow.md run as the page says, and print the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/guides/from-oneflow.md"
SCRIPTS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
SETTING = "devices_per_host=2"


def losses(name: str, folder: Path, devices: int) -> list[float]:
    text = SCRIPTS[name]
    assert text.count(SETTING) == 1
    (folder / f"{name}.py").write_text(text.replace(SETTING, f"devices_per_host={devices}"))
    done = subprocess.run([sys.executable, f"{name}.py"], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ("2 workers" in done.stderr) == (devices == 2)
    assert (folder / "mlp").is_dir()
    return [float(line) for line in done.stdout.split()]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [[("mirrored", 2)], pytest.param([("consistent", 2), ("mirrored", 1)], marks=pytest.mark.exhaustive)],
)
def test_both_views_print_the_same_losses_on_one_and_two_devices(others: list[tuple[str, int]], tmp_path: Path):
    found = losses("consistent", tmp_path, 1)
    assert len(found) == 2
    assert found[0] > 2 > found[1]
    for name, devices in others:
        assert losses(name, tmp_path, devices) == pytest.approx(found, rel=1e-5)
