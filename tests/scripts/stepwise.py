"""Runs scripts one after the other, and records a digest of all parameters after every optimizer step.

`python stepwise.py NAME.json SCRIPT ARGUMENTS… -- SCRIPT ARGUMENTS… -- …`: each script runs as `__main__` in a process
of its own, forked here so that torch is imported once, in a folder of its own under this one. The file gets, for each,
its digests, what it printed, and its exit code.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  # once, for all scripts
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def digest_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the bits of every parameter and every tensor of the optimizer's state."""
    digest = hashlib.blake2b(digest_size=16)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for tensor in (parameter, *optimizer.state[parameter].values()):
                if isinstance(tensor, torch.Tensor):
                    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_one(words: list[str], folder: Path, answer: Connection) -> None:
    folder.mkdir()
    os.chdir(folder)
    sys.argv = words
    digests: list[str] = []
    printed = io.StringIO()
    register_optimizer_step_post_hook(lambda optimizer, *_: digests.append(digest_of(optimizer)))
    failure = ""
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except BaseException:
            failure = traceback.format_exc()
    answer.send({"digests": digests, "printed": printed.getvalue(), "failure": failure})


def main(file: str, *words: str) -> None:
    scripts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            scripts.append([])
        else:
            scripts[-1].append(word)
    context = multiprocessing.get_context("fork")
    results: list[Any] = []
    for number, script in enumerate(scripts):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_one, args=(script, Path.cwd() / f"script{number}", theirs))
        process.start()
        results.append(ours.recv())
        process.join()
    Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
