"""A plain script trains on two hosts (network namespaces) as on one device."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

TRAIN = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(57, 6)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16, affine=False), torch.nn.ReLU(), torch.nn.Dropout(0.2),
    torch.nn.Linear(16, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for epoch in range(3):
    for inputs, labels in DataLoader(dataset, batch_size=16, shuffle=True, num_workers=epoch % 2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.12f}", flush=True)
print(f"weights {sum(item.square().sum().item() for item in model.parameters()):.12f}")
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


def read_numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^(?:loss|weights) ([0-9.]+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plain_script_on_two_hosts_is_the_training_of_one_device(hosts: Hosts, tmp_path: Path, workers: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    listed = ",".join(f"{address}:{workers}" for address in hosts.addresses)
    done = hosts.run(
        "a", [sys.executable, "-m", "rankless", "run", "--seed", "0", "--hosts", listed, "train.py"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "train.py knows no ranks" in done.stderr
    wanted = read_numbers(alone.stdout)
    assert len(wanted) == 4
    assert read_numbers(done.stdout) == pytest.approx(wanted, rel=1e-9, abs=1e-11)
