"""The blocks of docs/guides/checkpoints.md, run one after the other as one script: alone, and on workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_every_block_of_the_page_runs(tmp_path: Path, workers: int) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    assert len(blocks) >= 5
    script = "\n".join(body for kind, body in blocks if kind == "python")
    (tmp_path / "page.py").write_text(script)
    launcher = ["-m", "rankless", "run", "-n", str(workers), "--devices", "cpu"] if workers else []
    command = [sys.executable, *launcher, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs/a/step-" in done.stdout
    assert sorted(os.listdir(tmp_path / "digits")) == ["manifest.json", "tensors.safetensors"]
    assert len(os.listdir(tmp_path / "sharded")) == 1 + max(1, workers)
    (export,) = [body for kind, body in blocks if kind == "sh"]
    command = [sys.executable, "-m", *export.split()]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = safetensors.torch.load_file(tmp_path / "digits.safetensors")
    assert sorted(exported) == ["model.0.bias", "model.0.weight", "model.2.bias", "model.2.weight"]
