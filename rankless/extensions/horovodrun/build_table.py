"""The table of `horovodrun --check-build`: what Horovod's API finds here."""

import importlib.util
import subprocess
import sys

from rankless.version import VERSION

_ASK = "import torch.distributed as d; print(d.is_available() and d.is_gloo_available(), d.is_nccl_available())"
_SECONDS = 120.0


HOROVOD_VERSION = "0.28.1"
"""The release of Horovod whose API, behaviour and command line Rankless has."""


def build_table() -> str:
    """Return Horovod's table, for Rankless."""
    has_torch = importlib.util.find_spec("torch") is not None
    gloo, nccl = _backends() if has_torch else (False, False)
    tables = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": has_torch, "MXNet": False},
        "Available Controllers": {"MPI": False, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": gloo},
    }
    blocks = [f"Horovod v{HOROVOD_VERSION}: its API, by Rankless {VERSION}"]
    for title, rows in tables.items():
        lines = [f"    [{'X' if is_there else ' '}] {name}" for name, is_there in rows.items()]
        blocks.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(blocks)


def _backends() -> tuple[bool, bool]:
    """Return whether PyTorch has Gloo and NCCL. Another process imports torch, because the launcher does not."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS)
    gloo, nccl = done.stdout.split() if done.returncode == 0 else ("False", "False")
    return gloo == "True", nccl == "True"
