"""The scripts of docs/from-oneflow.md run as the page says, and print the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/from-oneflow.md"
SCRIPTS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
SETTING = "devices_per_host=2"
RUNS = (("consistent", 1), ("consistent", 2), ("mirrored", 2))
"""The mirrored view on one device is tested in tests/views."""


def losses(name: str, folder: Path, devices: int) -> list[float]:
    text = SCRIPTS[name]
    assert text.count(SETTING) == 1
    (folder / f"{name}.py").write_text(text.replace(SETTING, f"devices_per_host={devices}"))
    done = subprocess.run([sys.executable, f"{name}.py"], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ("2 workers" in done.stderr) == (devices == 2)
    assert (folder / "mlp").is_dir()
    return [float(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_both_views_print_the_same_losses_on_one_device_and_on_two(tmp_path: Path):
    found = [losses(name, tmp_path, devices) for name, devices in RUNS]
    assert len(found[0]) == 2
    assert found[0][0] > 2 > found[0][1]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)
