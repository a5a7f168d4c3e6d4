"""Looking at a host's GPUs without CUDA: device files, the driver, and what torch was built for."""

import glob
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankless.config.environment import user_visible_devices
from rankless.launch.doctor.probe_protocol import Look
from rankless.records.check_results import Row, failed, passed, warned

MOST_DRIVER_SECONDS = 5.0
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By CUDA's first number: the driver's, from NVIDIA's table of minor version compatibility (Linux)."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What this host says of its GPUs."""

    files: int = 0
    """How many device files there are."""
    names: Sequence[str] | None = None
    """As the driver's tool lists them; None where there is no such tool."""
    driver: str = ""
    complaint: str = ""
    """Of the tool, where it fails."""
    visible: Sequence[str] | None = None
    """What CUDA_VISIBLE_DEVICES leaves; None where it is not set."""
    cuda: str | None = None
    """Torch's, if it is built for any."""


def gpus(look: Look) -> list[Row]:
    """Whether there are GPUs, the driver serves them, torch can use them, and enough are visible."""
    return judged(_found(), workers=look.workers)


def judged(found: Gpus, *, workers: int) -> list[Row]:
    """The rows that tell of these GPUs, for so many workers on this host."""
    if not found.files and (not found.names or found.complaint):
        return [_none(found)]
    if found.names is None:
        fix = "install the driver's tools, to see more"
        return [warned("GPUs", f"{found.files} device files, but no nvidia-smi to ask", fix)]
    if found.complaint:
        fix = "load the driver (modprobe nvidia), or restart this host: it may have been updated"
        return [failed("GPUs", f"nvidia-smi fails: {found.complaint}", fix)]
    if not found.files:
        fix = "start the container with --gpus all"
        return [failed("GPUs", f"the driver has {_kinds(found.names)}, but no /dev/nvidia0 is here", fix)]
    return [_visible(found, found.names, workers), _driver(found)]


def torch_cuda() -> str | None:
    """The version of CUDA that torch was built for, read from its files; None for a build without."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "version.py"
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def _found() -> Gpus:
    files, visible, cuda = len(glob.glob("/dev/nvidia[0-9]*")), user_visible_devices(), torch_cuda()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Gpus(files=files, visible=visible, cuda=cuda)
    words = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(files=files, names=(), complaint=str(error), visible=visible, cuda=cuda)
    if done.returncode != 0:
        complaint = " ".join((done.stdout + done.stderr).split())[:200] or f"exit code {done.returncode}"
        return Gpus(files=files, names=(), complaint=complaint, visible=visible, cuda=cuda)
    listed = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    names = [name.strip() for name, _, _ in listed]
    driver = listed[0][2].strip() if listed else ""
    return Gpus(files=files, names=names, driver=driver, visible=visible, cuda=cuda)


def _none(found: Gpus) -> Row:
    if found.visible:
        fix = "unset CUDA_VISIBLE_DEVICES; in a container: --gpus all"
        return warned("GPUs", f"no NVIDIA GPU, yet CUDA_VISIBLE_DEVICES={','.join(found.visible)}", fix)
    built = f" (torch has CUDA {found.cuda})" if found.cuda else ""
    return passed("GPUs", f"no NVIDIA GPU: workers compute on the CPU{built}")


def _visible(found: Gpus, names: Sequence[str], workers: int) -> Row:
    kinds, usable, visible = _kinds(names), len(names), found.visible
    if visible is not None:
        kinds += f"; CUDA_VISIBLE_DEVICES={','.join(visible) or 'none'}"
        usable = len(visible)
        absent = [name for name in visible if name.isdigit() and int(name) >= len(names)]
        twice = [name for name in visible if visible.count(name) > 1]
        if absent or twice:
            wrong = f"{absent[0]} is not there" if absent else f"{twice[0]} is named twice"
            fix = f"set it to different numbers below {len(names)}, or unset it"
            return failed("GPUs", f"{kinds}: {wrong}", fix)
    if not usable:
        return warned("GPUs", f"{kinds}: all are hidden", "unset CUDA_VISIBLE_DEVICES to compute on them")
    if workers > usable:
        fix = "start one worker for each GPU; or compute on the CPU: --devices cpu"
        return warned("GPUs", f"{kinds}: {workers} workers would share {usable}, and talk through Gloo", fix)
    return passed("GPUs", kinds)


def _driver(found: Gpus) -> Row:
    if found.cuda is None:
        fix = "install torch's build for CUDA, or give --devices cpu"
        return warned("driver", f"{found.driver}, but torch is not there or built without CUDA", fix)
    oldest = OLDEST_DRIVERS.get(int(found.cuda.partition(".")[0]))
    first = found.driver.partition(".")[0]
    if oldest is not None and first.isdigit() and int(first) < oldest:
        fix = f"install driver {oldest} or newer, or a torch that was built for an older CUDA"
        return failed("driver", f"{found.driver}, too old for torch's CUDA {found.cuda}", fix)
    return passed("driver", f"{found.driver}, for torch's CUDA {found.cuda}")


def _kinds(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
