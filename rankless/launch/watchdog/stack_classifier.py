"""Tell from a Python stack which line of the script a rank is at, and whether it waits there for other ranks."""

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rankless.config.extensions import list_extensions
from rankless.launch.watchdog.phase_timeouts import BY_NAME, PhaseName, extension_files, find_phase
from rankless.launch.watchdog.stacks import Frame
from rankless.user_code import PACKAGE_FOLDER, STANDARD_FOLDER, is_library, shorten_path

_WORKER = os.path.join(PACKAGE_FOLDER, "runtime", "worker.py")
_C10D = "torch/distributed/distributed_c10d.py"
_DDP = "torch/nn/parallel/distributed.py"
_DATA_LOADER = "torch/utils/data/dataloader.py"
_DATA_LOADER_WORKER = "torch/utils/data/_utils/worker.py"
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/debugpy/", "/pydevd", "/_pydev_bundle/", "/ipdb/", "/pudb/")
_WAITING_CALLS = (".wait(", "wait_tensor(")
"""In a line of the script that calls C code: the wait for a PyTorch work, future or store."""
_STORE_CALL = re.compile(
    r"\b(?:TCP|File|Prefix)Store\(|\w*store\w*\.(?:get|multi_get|wait|add|compare_set|barrier)\(", re.IGNORECASE
)
"""In a line of the script that calls C code: a store that may wait for other ranks."""
_BACKENDS = "collectives/backends/"
"""The process groups in shared memory. A call of torch.distributed, or of Rankless, lies around their frames."""
_RENDEZVOUS_CALLS = ("init_process_group", "new_group")
_OWN_WAITS = "checkpoint/"
"""Where a rank waits for a disk or a thread of its own, and for other ranks only through `collectives`."""
_GPU_CALLS = (".item(", ".tolist(", ".cpu(", ".numpy(", "synchronize(", ".to(")
"""In a line of the script: calls in which the CPU waits for the GPU, and so for the ranks that the GPU waits for."""
_WAITING_MODULES = (
    "collectives/",
    "compiler/",
    "runtime/rendezvous/",
    "runtime/process_context.py",
    "runtime/process_groups.py",
    "runtime/hooks/init_process_group.py",
)
_MODULE_LABELS = {
    "jobs/job.py": "a job's call",
    "data/loader.py": "a loader",
    "data/logical_tensor.py": "an operation on a logical batch",
    "runtime/current_context.py": "the rendezvous at the start",
    "runtime/hooks/init_process_group.py": "init_process_group",
    "runtime/worker.py": "the end of the script",
}
_MAX_FRAMES = 6


@dataclass(frozen=True, kw_only=True)
class StackLocation:
    """Where a process is in the script, and what it waits for there."""

    collective: str = ""
    """The collective in which the process waits for other ranks; empty if it is in none."""
    is_rendezvous: bool = False
    """Whether it waits there for the others to join a group or a store."""
    waits_for_data: bool = False
    """Whether the process waits for the worker processes of its DataLoader."""
    phase: PhaseName = "script"
    is_debugged: bool = False
    gpu_wait: str = ""
    """The call in which a process on a GPU may wait for that GPU."""
    line: str = ""
    text: str = ""
    stack: tuple[str, ...] = ()


def classify_stack(stack: Sequence[Frame]) -> StackLocation:
    """Classify a stack, given innermost frame first."""
    frames = _without_bootstrap(stack)
    if not frames or (frames[-1].file == "<string>" and any(frame.file.startswith(_WORKER) for frame in frames)):
        return StackLocation(
            collective=_find_collective(frames),
            phase=_find_phase(frames, is_joining=False, is_at_end=True),
            text="the end of its script",
        )
    script = [frame for frame in frames if not is_library(frame.file)]
    script = script or frames[-1:]
    inner = frames[: frames.index(script[0])]
    folder = find_script_folder(script[::-1])
    source = linecache.getline(script[0].file, script[0].line)
    waits_for_data = any(frame.file.endswith(_DATA_LOADER) for frame in inner)
    collective = "" if waits_for_data else _find_collective(inner)
    store_call = _STORE_CALL.search(source) if not inner else None
    if store_call is not None:
        collective = f"{store_call[0].rstrip('(')}()"
    elif not inner and any(call in source for call in _WAITING_CALLS):
        collective = "wait()"
    is_rendezvous = store_call is not None or (collective != "" and _is_rendezvous(inner))
    gpu = collective or next((call.strip(".(") + "()" for call in _GPU_CALLS if call in source), "")
    return StackLocation(
        collective=collective,
        is_rendezvous=is_rendezvous,
        phase=_find_phase(frames, is_joining=is_rendezvous, is_at_end=False),
        waits_for_data=waits_for_data,
        is_debugged=any(part in frame.file for frame in frames for part in _DEBUGGERS),
        gpu_wait=gpu,
        line=format_line(script[0], folder),
        text=describe_location(script, folder),
        stack=tuple(
            f'File "{shorten_path(frame.file, folder)}", line {frame.line}, in {frame.function}'
            for frame in script[::-1]
        ),
    )


def locate_data_loader_worker(stack: Sequence[Frame]) -> StackLocation | None:
    """Return where a DataLoader worker is in the script's own code; None if it is idle or is another process."""
    end = next((index for index, frame in enumerate(stack) if frame.file.endswith(_DATA_LOADER_WORKER)), None)
    if end is None:
        return None
    script = [frame for frame in stack[:end] if not is_library(frame.file)]
    return StackLocation(line=format_line(script[0]), text=describe_location(script)) if script else None


def describe_location(script: Sequence[Frame], folder: str = "") -> str:
    """Describe a stack of the script's frames as "load() at data.py:12, called from train.py:20"."""
    innermost = script[0]
    text = (
        format_line(innermost, folder)
        if innermost.function == "<module>"
        else f"{innermost.function}() at {format_line(innermost, folder)}"
    )
    callers = [frame for frame in script[1:] if frame.function != innermost.function]
    return f"{text}, called from {format_line(callers[0], folder)}" if callers else text


def find_script_folder(frames: Sequence[Frame]) -> str:
    """Return the folder of the script that runs in these frames, outermost first; "" if none is a script's."""
    script = next((frame.file for frame in frames if frame.function == "<module>" and os.path.isabs(frame.file)), "")
    return os.path.dirname(script)


def format_line(frame: Frame, folder: str = "") -> str:
    """Format a frame's file and line as "train.py:33"; see `shorten_path`."""
    return f"{shorten_path(frame.file, folder)}:{frame.line}"


def truncate_stack(stack: Sequence[str]) -> list[str]:
    """Return the innermost frames of the script, as many as a short report can show."""
    return [*(["..."] if len(stack) > _MAX_FRAMES else []), *stack[-_MAX_FRAMES:]]


def _without_bootstrap(stack: Sequence[Frame]) -> list[Frame]:
    """Return the frames from the script's first line inwards, without the frames that started the worker."""
    start = f"{PACKAGE_FOLDER}runtime{os.sep}"
    outermost = [index for index, frame in enumerate(stack) if frame.file.startswith(start + "user_program")]
    return list(stack[: outermost[-1]] if outermost else stack)


def _find_phase(frames: Sequence[Frame], *, is_joining: bool, is_at_end: bool) -> PhaseName:
    files = [frame.file.replace(os.sep, "/") for frame in frames if is_library(frame.file)]
    return find_phase(files, is_joining=is_joining, is_at_end=is_at_end)


def _find_collective(inner: Sequence[Frame]) -> str:
    """Return the collective that library frames, innermost first, are in; empty for none."""
    innermost = next((frame.file for frame in inner if not frame.file.startswith(STANDARD_FOLDER)), "")
    if innermost.startswith(PACKAGE_FOLDER) and _package_path(innermost).startswith(_OWN_WAITS):
        return ""
    outside = [frame for frame in inner if not _is_in_backend(frame)]
    if inner and not outside:  # the script calls the group, or waits for its work
        return "wait()" if inner[-1].function == "wait" else inner[-1].function
    inner = outside
    files = [frame.file.replace(os.sep, "/") for frame in inner]
    if any(file.endswith(_DDP) for file in files):
        starts = any(frame.function == "__init__" for frame, file in zip(inner, files, strict=True) if _DDP in file)
        return f"DistributedDataParallel's {'start' if starts else 'forward'}"
    if inner and _is_waiting_file(files[0]):
        return _name_rankless_call(inner, files)
    named = [frame.function for frame, file in zip(inner, files, strict=True) if file.endswith(_C10D)]
    if any(file.startswith(PACKAGE_FOLDER) for file in files) and (
        named or any("torch/distributed/" in file for file in files)
    ):
        return _name_rankless_call(inner, files)
    public = [name for name in named if not name.startswith("_")]
    if public:
        return public[-1]
    others = [frame.function for frame, file in zip(inner, files, strict=True) if "torch/distributed/" in file]
    if others:
        return others[-1]
    if inner and files[0].endswith(_BACKWARD[0]) and inner[0].function == _BACKWARD[1]:
        return "backward()"
    return _name_rankless_call(inner, files) if any(map(_is_waiting_file, files)) else ""


def _is_waiting_file(file: str) -> bool:
    """Whether ranks wait for others in a file of Rankless or of an extension."""
    is_own = file.startswith(PACKAGE_FOLDER) and _package_path(file).startswith(_WAITING_MODULES)
    return is_own or file.startswith(extension_files("waits"))


def _is_rendezvous(inner: Sequence[Frame]) -> bool:
    """Whether library frames are in a rendezvous: PyTorch's, or Rankless's."""
    files = [frame.file.replace(os.sep, "/") for frame in inner]
    return any(
        any(part in file for part in BY_NAME["joining"].files)
        or file.startswith(extension_files("joins"))
        or (file.endswith(_C10D) and frame.function in _RENDEZVOUS_CALLS)
        for frame, file in zip(inner, files, strict=True)
    )


def _is_in_backend(frame: Frame) -> bool:
    file = frame.file.replace(os.sep, "/")
    return file.startswith(PACKAGE_FOLDER) and _package_path(file).startswith(_BACKENDS)


def _package_path(file: str) -> str:
    return file.removeprefix(PACKAGE_FOLDER.replace(os.sep, "/"))


def _name_rankless_call(inner: Sequence[Frame], files: Sequence[str]) -> str:
    """Return the Rankless call that the script made, from the outermost frame of the package."""
    for frame, file in reversed(list(zip(inner, files, strict=True))):
        name = _name_extension_call(frame, file)
        if name:
            return name
        if not file.startswith(PACKAGE_FOLDER):
            continue
        file = _package_path(file)
        if file in _MODULE_LABELS:
            return _MODULE_LABELS[file]
        if file == "api.py" and not frame.function.startswith("_"):
            return f"rankless.{frame.function}"
        if file.startswith("collectives/") and not frame.function.startswith("_"):
            return f"rankless.collectives.{frame.function}"
    return "a call of Rankless"


def _name_extension_call(frame: Frame, file: str) -> str:
    """Return what an extension calls a wait in one of its files; "" if it has no name for it."""
    for extension in list_extensions():
        inside = file.removeprefix(f"{extension.folder}/")
        if inside == file:
            continue
        if inside in extension.stacks.labels:
            return extension.stacks.labels[inside]
        prefix = next((name for folder, name in extension.stacks.calls.items() if inside.startswith(folder)), "")
        return f"{prefix}.{frame.function}" if prefix and not frame.function.startswith("_") else ""
    return ""
