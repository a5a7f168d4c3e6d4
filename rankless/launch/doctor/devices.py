"""Looking at a host's GPUs without CUDA: device files, the driver, and what torch was built for."""

import glob
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from rankless.launch.doctor.questions import Look
from rankless.plan.environment import user_visible_devices
from rankless.records.health import Row, failed, passed, warned

MOST_DRIVER_SECONDS = 5.0
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By CUDA's first number: the driver's, from NVIDIA's table of minor version compatibility (Linux)."""


def gpus(look: Look) -> list[Row]:
    """Whether there are GPUs, the driver serves them, torch can use them, and enough are visible."""
    files = glob.glob("/dev/nvidia[0-9]*")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if not files:
            return [_none(torch_cuda())]
        return [warned("GPUs", f"{len(files)} device files, no nvidia-smi", "install the driver's tools, to see more")]
    try:
        listed = _asked(tool)
    except (OSError, subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        if not files:
            return [_none(torch_cuda())]
        output = getattr(error, "stdout", "") or str(error)
        said = " ".join(str(output).split())[:200]
        return [failed("GPUs", f"nvidia-smi fails: {said}", "load the driver (modprobe nvidia), or restart this host")]
    names, driver = [name for name, _ in listed], listed[0][1] if listed else ""
    if not files:
        fix = "start the container with --gpus all"
        return [failed("GPUs", f"the driver has {len(names)}, but no /dev/nvidia0 is here", fix)]
    return [_visible(names, look), _driver(driver)]


def torch_cuda() -> str | None:
    """The version of CUDA that torch was built for, read from its files; None for a build without."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "version.py"
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def _none(cuda: str | None) -> Row:
    visible = user_visible_devices()
    if visible:
        fix = "unset CUDA_VISIBLE_DEVICES; in a container: --gpus all"
        return warned("GPUs", f"no NVIDIA GPU, yet CUDA_VISIBLE_DEVICES={','.join(visible)}", fix)
    return passed("GPUs", "no NVIDIA GPU: workers compute on the CPU" + (f" (torch has CUDA {cuda})" if cuda else ""))


def _asked(tool: str) -> list[tuple[str, str]]:
    words = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_DRIVER_SECONDS, check=True)
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, driver in rows]


def _visible(names: list[str], look: Look) -> Row:
    visible = user_visible_devices()
    kinds = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    if visible is None:
        usable = len(names)
    else:
        kinds += f"; CUDA_VISIBLE_DEVICES={','.join(visible) or 'none'}"
        absent = [name for name in visible if name.isdigit() and int(name) >= len(names)]
        if absent or len(set(visible)) < len(visible):
            fix = f"set CUDA_VISIBLE_DEVICES to different numbers below {len(names)}, or unset it"
            return failed(
                "GPUs", f"{kinds}: {', '.join(absent)} is not there" if absent else f"{kinds}: one twice", fix
            )
        usable = len(visible)
    if not usable:
        return warned("GPUs", f"{kinds}: all are hidden", "unset CUDA_VISIBLE_DEVICES to compute on them")
    if look.workers > usable:
        fix = "one worker for each GPU is fastest; with --devices cpu they compute on the CPU"
        return warned("GPUs", f"{kinds}: {look.workers} workers would share {usable}, and talk through Gloo", fix)
    return passed("GPUs", kinds)


def _driver(driver: str) -> Row:
    cuda = torch_cuda()
    if cuda is None:
        fix = "install torch's build for CUDA, or give --devices cpu"
        return warned("driver", f"{driver}, but torch is a build without CUDA", fix)
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    first = driver.partition(".")[0]
    if oldest is not None and first.isdigit() and int(first) < oldest:
        fix = f"install driver {oldest} or newer, or a torch that was built for an older CUDA"
        return failed("driver", f"{driver}, too old for torch's CUDA {cuda}", fix)
    return passed("driver", f"{driver}, for torch's CUDA {cuda}")
