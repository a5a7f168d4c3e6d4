"""The same script in different folders of two hosts is the same script."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.test_hosts import command, ended, listed
from support.hosts import Hosts, two_hosts

pytestmark = pytest.mark.slow

NETWORK = """
import torch

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, inputs):
        return self.layer(inputs) - inputs.median()

def pad(samples):
    return torch.stack(samples) - torch.stack(samples).mean(0)
"""
IN_TWO_FILES = """
import torch, rankless
from network import Network, pad

torch.manual_seed(0)
model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return model(inputs).square().mean()

if __name__ == "__main__":
    for inputs in rankless.loader(torch.arange(42.0).reshape(14, 3) / 42, batch_size=7, collate_fn=pad):
        train(inputs)
    print(f"trained on {rankless.world_size()}", flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["run", pytest.param("verify", marks=pytest.mark.exhaustive)])
def test_each_host_may_keep_the_script_in_another_folder(task: str, hosts: Hosts, tmp_path: Path):
    there = tmp_path / "there" / "deeper"
    there.mkdir(parents=True)
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "train.py").write_text(IN_TWO_FILES)
    for name in ("train.py", "network.py"):
        shutil.copy(tmp_path / name, there / name)
    words = ["--hosts", listed(hosts), "--no-ssh", "--insecure", "train.py"]
    other = hosts.start("b", command("run", *words), cwd=there)
    done = hosts.run("a", command(task, *words), cwd=tmp_path, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("trained on 4" if task == "run" else "same training: 2 steps") in done.stdout, done.stdout
    if task == "run":  # the lines of an operator and of a function
        assert "rankless: network.py:10: job 'train' runs in full on every rank: median of model" in done.stderr
        assert "rankless: collate_fn pad (network.py:12) needs the whole batch" in done.stderr
    assert ended(other)[0] == 0
