"""Libraries that write what may be logical: `torch.save`, safetensors, TensorBoard and wandb.

See also `native_library_files`.

Values that they write may be logical tensors, whose reads are collective. So every rank makes each call, and only the
last step, onto the disk or the network, is rank 0's.
"""

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from rankless.plain_script.effects_on_first_rank import Effects, replace_everywhere, take_whole_values
from rankless.plain_script.file_effects import FileEffects
from rankless.plain_script.silent_tensorboard_writers import FURTHER_FILES, silence_events

SAVING = {
    "torch": (
        ("serialization", "save", 1),
        ("jit", "save", 1),
        ("jit.RecursiveScriptModule", "save", 1),
        ("jit.ScriptModule", "save", 1),  # of traced modules
        ("jit.ScriptFunction", "save", 1),
    ),
    "safetensors.torch": (("", "save_file", 1),),
    "safetensors.numpy": (("", "save_file", 1),),
}
"""By module: functions that write a file in C++ or Rust, and the place of its path among their arguments."""


class LibraryWriters:
    """The libraries that this rank's script writes with.

    Args:
        effects: What the ranks do once.
        files: The files that the script changes.
    """

    def __init__(self, effects: Effects, files: FileEffects) -> None:
        self._effects = effects
        self._files = files
        self.patches: dict[str, Callable[[Any], None]] = {
            **{name: functools.partial(self._patch_saving, name) for name in SAVING},
            "torch.utils.tensorboard.writer": self._patch_tensorboard,
            "wandb": self._patch_wandb,
            "numpy.random": self._patch_numpy,
        }
        """By the name of a module: what to do when the script has imported it."""

    def _patch_saving(self, name: str, module: Any) -> None:
        for inner, function, place in SAVING[name]:
            owner = attrgetter(inner)(module) if inner else module
            saved = self._saving(vars(owner)[function], place)
            replace_everywhere([(owner, function, saved)])
            if vars(module).get(function) is saved.__wrapped__:  # type: ignore[attr-defined]  # functools.wraps sets it
                setattr(module, function, saved)

    def _saving(self, save: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return a function that computes on every rank what it saves, and writes the file on rank 0."""

        @functools.wraps(save)
        def save_once(*args: Any, **kwargs: Any) -> Any:
            named = next((key for key in ("f", "filename") if key in kwargs), None)
            given = kwargs[named] if named else args[place] if place < len(args) else None
            path = None if isinstance(given, int) or not self._effects.is_active else self._files.find_path(given)
            if path is None or not self._files.is_shared(path):
                return save(*args, **kwargs)
            try:  # all ranks learn now if it fails
                self._files.open(given, "wb").close()
            except OSError:  # the function has its own error for this
                return self._effects.once(
                    f"{save.__name__} to {self._files.describe(path)}", lambda: save(*args, **kwargs)
                )
            with self._find_target(given, save) as target:
                if named:
                    kwargs[named] = target
                else:
                    args = (*args[:place], target, *args[place + 1 :])
                return self._effects.finish_together(lambda: save(*args, **kwargs))

        return save_once

    @contextlib.contextmanager
    def _find_target(self, given: Any, save: Callable[..., Any]) -> Iterator[Any]:
        """Yield where this rank writes: rank 0 where the script says, the others where nobody reads."""
        if self._effects.is_first:
            yield given
        elif save.__module__.startswith("torch."):
            yield os.devnull
        else:  # safetensors renames a file of its own to the target, and so would replace the null device
            with self._effects.alone():
                folder = tempfile.mkdtemp()
            try:
                yield os.path.join(folder, "unread")
            finally:
                with self._effects.alone():
                    shutil.rmtree(folder)

    def _patch_tensorboard(self, module: Any) -> None:
        """Let rank 0 alone write events."""
        writer = module.SummaryWriter
        silence_events(writer, lambda _: not self._effects.is_first)
        for name, method in list(vars(writer).items()):
            if name.startswith("add_") or name in ("__init__", "flush", "close"):
                setattr(writer, name, self._event_method(name, method))

    def _event_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a `SummaryWriter`, which on other ranks than 0 writes no files."""
        effects = self._effects

        @functools.wraps(method)
        def call(writer: Any, *args: Any, **kwargs: Any) -> Any:
            if not effects.is_active:
                return method(writer, *args, **kwargs)
            if name in FURTHER_FILES:
                args, kwargs = take_whole_values(args), take_whole_values(kwargs)
            if name.startswith("add_"):
                with effects.alone():
                    return None if name in FURTHER_FILES and not effects.is_first else method(writer, *args, **kwargs)
            effects.meet(f"SummaryWriter.{name}")
            result = self._effects.finish_together(lambda: method(writer, *args, **kwargs))
            if name == "__init__":
                writer.log_dir = effects.share(lambda: str(writer.log_dir)) if effects.can_meet else writer.log_dir
            return result

        return call

    def _patch_wandb(self, module: Any) -> None:
        """Let rank 0 alone have a run. The others have one that does nothing."""
        start = module.init
        self._effects.exempt.append(os.path.dirname(module.__file__) + os.sep)

        @functools.wraps(start)
        def init(*args: Any, **kwargs: Any) -> Any:
            if not self._effects.is_active:
                return start(*args, **kwargs)
            if not self._effects.is_first:
                kwargs["mode"] = "disabled"
            self._effects.meet("wandb.init")
            run = self._effects.finish_together(lambda: start(*args, **kwargs))
            type(run).log = with_whole_values(type(run).log)
            module.log = run.log  # as `wandb.init` does
            return run

        module.init = init

    def _patch_numpy(self, _module: Any) -> None:
        """Let `numpy.savetxt` use the present `open`: it keeps the one that Python had when NumPy was imported."""
        openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
        if openers is not None:
            openers._file_openers[None] = self._files.open


def with_whole_values(log: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes whole tensors in place of logical ones."""
    if hasattr(log, "takes_whole_values"):
        return log

    @functools.wraps(log)
    def log_whole(*args: Any, **kwargs: Any) -> Any:
        return log(*take_whole_values(args), **take_whole_values(kwargs))

    log_whole.takes_whole_values = True  # type: ignore[attr-defined]  # a mark
    return log_whole
