"""Measures background and synchronous saves alternately, or loads of Rankless and of PyTorch."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import rankless
from bench.models import GPT, random_text

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["stall", "resume"])
parser.add_argument("--pairs", type=int, default=11)
parser.add_argument("--width", type=int, default=640)
arguments = parser.parse_args()

torch.manual_seed(0)
model = GPT(layers=4, width=arguments.width)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
inputs, targets = random_text(rows=4)
parts = {"model": model, "optimizer": optimizer}


@rankless.job(model=model, optimizer=optimizer)
def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def save_in_background() -> float:
    seconds = seconds_of(lambda: rankless.save("behind", background=True, **parts))
    behind.wait()
    return seconds


def save_synchronously() -> float:
    return seconds_of(lambda: rankless.save("now", **parts))


def load_ours() -> float:
    return seconds_of(lambda: rankless.load("now", **parts))


def load_torch() -> float:
    def load() -> None:
        states = torch.load("torch.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])

    return seconds_of(load)


behind = rankless.checkpoints("row")
train(inputs, targets)
rankless.save("now", **parts)
if rankless.rank() == 0:
    torch.save({name: part.state_dict() for name, part in parts.items()}, "torch.pt")
ours, peer = (save_in_background, save_synchronously) if arguments.what == "stall" else (load_ours, load_torch)
rankless.once(lambda: None)  # every rank waits until the file is there
ours(), peer()
times = []
for number in range(arguments.pairs):
    train(inputs, targets)
    if number % 2 == 0:
        first = ours()
        times.append((first, peer()))
    else:
        first = peer()
        times.append((ours(), first))
if rankless.rank() == 0:
    Path("times.json").write_text(json.dumps(times))
