"""Jobs with `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`: the same training as plain PyTorch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/train_sparse.py"
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adagrad", "sparse_adam", "ftrl")
RUNS = [("-n", "1"), ("-n", "2"), ("-n", "3"), *(("--servers", "2", "-n", str(count)) for count in (1, 2, 3))]


def read_forms(output: str) -> dict[str, dict[str, list[float]]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line.pop("form"): line for line in lines}


@pytest.mark.slow
@pytest.mark.ci_sample(8)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_every_form_of_a_sparse_embedding_trains_as_in_plain_pytorch(tmp_path, optimizer, options):
    command = (sys.executable, str(SCRIPT), "--plain", "--optimizer", optimizer)
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    done = rankless("run", *options, "--no-progress", str(SCRIPT), "--optimizer", optimizer, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = read_forms(plain.stdout), read_forms(done.stdout)
    assert len(wanted) > 20
    assert list(found) == list(wanted)
    for form, parts in wanted.items():
        for part, numbers in parts.items():
            assert found[form][part] == pytest.approx(numbers, rel=0, abs=1e-10), f"{form}: {part}"
