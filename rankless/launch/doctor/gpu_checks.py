"""Check a host's GPUs without CUDA: device files, the driver, and the CUDA version of torch."""

import glob
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankless.config.environment import user_visible_devices
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.records.check_results import CheckResult, make_failure, make_pass, make_warning

NVIDIA_SMI_TIMEOUT_SECONDS = 5.0
MIN_DRIVER_VERSIONS = {11: 450, 12: 525, 13: 580}
"""Oldest driver by CUDA major version, from NVIDIA's table of minor version compatibility (Linux)."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What this host reports about its GPUs."""

    files: int = 0
    """Number of device files."""
    names: Sequence[str] | None = None
    """As `nvidia-smi` lists them; None if it is not installed."""
    driver: str = ""
    error: str = ""
    """What `nvidia-smi` printed when it failed."""
    visible: Sequence[str] | None = None
    """The devices in CUDA_VISIBLE_DEVICES; None if it is not set."""
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a build without CUDA."""


def check_gpus(request: CheckHost) -> list[CheckResult]:
    """Check that the driver serves the GPUs, that torch can use them, and that enough are visible."""
    return evaluate_gpus(_collect_gpu_facts(), workers=request.workers)


def evaluate_gpus(facts: GpuFacts, *, workers: int) -> list[CheckResult]:
    """Return the results for these GPUs and this number of workers."""
    if not facts.files and (not facts.names or facts.error):
        return [_no_gpu_result(facts)]
    if facts.names is None:
        fix = "install the driver's tools to check the driver too"
        return [make_warning("GPUs", f"{facts.files} device files, but no nvidia-smi", fix)]
    if facts.error:
        fix = "load the driver (modprobe nvidia), or reboot this host if the driver was updated"
        return [make_failure("GPUs", f"nvidia-smi fails: {facts.error}", fix)]
    if not facts.files:
        fix = "start the container with --gpus all"
        return [
            make_failure("GPUs", f"the driver has {_count_names(facts.names)}, but /dev/nvidia0 does not exist", fix)
        ]
    return [_visible_devices_result(facts, facts.names, workers), _driver_result(facts)]


def read_torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, from its files; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "version.py"
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def _collect_gpu_facts() -> GpuFacts:
    files, visible, cuda = len(glob.glob("/dev/nvidia[0-9]*")), user_visible_devices(), read_torch_cuda_version()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return GpuFacts(files=files, visible=visible, cuda=cuda)
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as caught:
        return GpuFacts(files=files, names=(), error=str(caught), visible=visible, cuda=cuda)
    if done.returncode != 0:
        error = " ".join((done.stdout + done.stderr).split())[:200] or f"exit code {done.returncode}"
        return GpuFacts(files=files, names=(), error=error, visible=visible, cuda=cuda)
    listed = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    names = [name.strip() for name, _, _ in listed]
    driver = listed[0][2].strip() if listed else ""
    return GpuFacts(files=files, names=names, driver=driver, visible=visible, cuda=cuda)


def _no_gpu_result(facts: GpuFacts) -> CheckResult:
    if facts.visible:
        fix = "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all"
        return make_warning("GPUs", f"no NVIDIA GPU, but CUDA_VISIBLE_DEVICES={','.join(facts.visible)}", fix)
    built = f" (torch has CUDA {facts.cuda})" if facts.cuda else ""
    return make_pass("GPUs", f"no NVIDIA GPU: workers compute on the CPU{built}")


def _visible_devices_result(facts: GpuFacts, names: Sequence[str], workers: int) -> CheckResult:
    kinds, usable, visible = _count_names(names), len(names), facts.visible
    if visible is not None:
        kinds += f"; CUDA_VISIBLE_DEVICES={','.join(visible) or 'none'}"
        usable = len(visible)
        absent = [name for name in visible if name.isdigit() and int(name) >= len(names)]
        twice = [name for name in visible if visible.count(name) > 1]
        if absent or twice:
            wrong = f"device {absent[0]} does not exist" if absent else f"device {twice[0]} is listed twice"
            fix = f"set it to different numbers below {len(names)}, or unset it"
            return make_failure("GPUs", f"{kinds}: {wrong}", fix)
    if not usable:
        return make_warning("GPUs", f"{kinds}: all GPUs are hidden", "unset CUDA_VISIBLE_DEVICES to compute on them")
    if workers > usable:
        fix = "start one worker per GPU, or compute on the CPU with --devices cpu"
        return make_warning(
            "GPUs", f"{kinds}: {workers} workers would share {usable}, and communicate through Gloo", fix
        )
    return make_pass("GPUs", kinds)


def _driver_result(facts: GpuFacts) -> CheckResult:
    if facts.cuda is None:
        fix = "install a build of torch with CUDA, or set --devices cpu"
        return make_warning("driver", f"{facts.driver}, but torch is missing or built without CUDA", fix)
    oldest = MIN_DRIVER_VERSIONS.get(int(facts.cuda.partition(".")[0]))
    first = facts.driver.partition(".")[0]
    if oldest is not None and first.isdigit() and int(first) < oldest:
        fix = f"install driver {oldest} or newer, or a build of torch for an older CUDA"
        return make_failure("driver", f"{facts.driver}, too old for torch's CUDA {facts.cuda}", fix)
    return make_pass("driver", f"{facts.driver}, for torch's CUDA {facts.cuda}")


def _count_names(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
