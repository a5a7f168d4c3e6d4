"""What a job returns, as the annotation of its result says."""

import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankless.errors import ConfigError

from .typing import ListNumpy, Numpy


@dataclass(frozen=True)
class ResultType:
    """The annotation of a result: nothing, one blob, a tuple or list of blobs, or a dict of them by name."""

    annotation: Any

    @property
    def kind(self) -> Any:
        """None for nothing, `Tensor` for one blob, else `tuple`, `list` or `dict`; `object` for anything else."""
        if self.annotation in (None, inspect.Signature.empty):
            return None
        if self.annotation in (Numpy, ListNumpy):
            return Tensor
        found = typing.get_origin(self.annotation)
        return found if found in (tuple, list, dict) else object

    @property
    def leaves(self) -> list[Any]:
        """`Numpy` or `ListNumpy`, for each blob that the annotation names."""
        if self.kind is Tensor:
            return [self.annotation]
        return [each for each in typing.get_args(self.annotation) if each not in (str, Ellipsis)]

    def __str__(self) -> str:
        text = getattr(self.annotation, "__name__", str(self.annotation)) if self.kind is Tensor else self.annotation
        return "none" if self.kind is None else f"-> {text}".replace("rankless_oneflow.typing.", "")

    def check(self, result: Any, job: str, where: str) -> None:
        """Raise `ConfigError` if the result of a body is something else."""
        parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
        if self.kind in (None, Tensor):
            fits = result is None if self.kind is None else isinstance(result, Tensor)
        else:
            is_kind = isinstance(result, dict) if self.kind is dict else isinstance(result, tuple | list)
            is_open = self.kind is not tuple or Ellipsis in typing.get_args(self.annotation)
            fits = is_kind and all(isinstance(each, Tensor) for each in parts)
            fits = fits and (is_open or len(parts) == len(self.leaves))
        if not fits:
            raise ConfigError(
                expected=f"the result of job {job!r} as its annotation says, which is {self}",
                found=f"a {type(result).__name__}" + (f" of {len(parts)}" if parts else ""),
                fix="write -> tp.Numpy for a blob, -> Tuple[tp.Numpy, tp.Numpy] for two; or tp.ListNumpy",
                where=where,
            )


def to_arrays(result: Any) -> Any:
    """Return a result with NumPy arrays instead of blobs."""
    if isinstance(result, Tensor):
        return result.detach().cpu().numpy()
    if isinstance(result, dict):
        return {name: to_arrays(each) for name, each in result.items()}
    return None if result is None else tuple(map(to_arrays, result))


def merge_lists(results: Sequence[Any]) -> Any:
    """Return one structure of the results of all devices, with a list for each blob."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(map(list, zip(*results, strict=True)))
    if isinstance(first, dict):
        return {name: [each[name] for each in results] for name in first}
    return None if first is None else list(results)
