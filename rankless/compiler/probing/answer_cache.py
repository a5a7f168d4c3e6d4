"""The answers of probes on disk, one small file for each question."""

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec
import torch

from rankless.config.environment import user_cache_folder
from rankless.records.encoding import encode_json

VERSION = 2
"""Of the experiment. Answers of others are not read."""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """How an operator can be split."""

    candidate: int | None = None
    """The place of the division of its arguments among the candidates; None if none is right."""
    outputs: tuple[int | None, ...] = ()
    """The dims along which its results are divided then; None for a result that is absent."""


class AnswerCache:
    """Answers in a folder. A folder that cannot be written, or a damaged file, is the same as no answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, question: str) -> ProbeAnswer | None:
        """Return the answer to a question, or None if there is none."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._file(question).read_bytes(), type=ProbeAnswer)
        return None

    def save(self, question: str, answer: ProbeAnswer) -> None:
        """Keep an answer. Other processes see all of it or nothing."""
        file = self._file(question)
        own = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes(encode_json(answer))
            own.replace(file)

    def _file(self, question: str) -> Path:
        digest = hashlib.blake2b(f"{VERSION} {torch.__version__} {question}".encode(), digest_size=16)
        return self._folder / f"{digest.hexdigest()}.json"


def default_folder() -> Path:
    """Return the folder for answers: `rankless/probes` in the user's folder for caches."""
    return user_cache_folder() / "rankless" / "probes"
