"""Checks that the ranks of a logical view do the same, and names what they do differently.

Every rank runs the whole script, so all ranks make the same calls with the same values. What differs between processes
(the clock, the order of a set, an entropy of the system) could break that. Note [agreement]: each rank keeps a digest
of its calls and of the values that Python gave to them. Where ranks meet anyway (a value is read, gradients are summed,
a batch begins), they compare the digests and the states of their random generators, without a message. See Note [desync
detection]. A difference raises `RanksDiverged` on every rank before a step uses it.
"""

import os
import random
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy
import torch
from torch import Tensor

from rankless.collectives.value_encoding import view_bytes
from rankless.errors import RanklessError, RanksDiverged
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack
from rankless.user_code import script_line

KEPT_NOTES = 12
"""How many of the last noted values a rank can show to the others."""
KEPT_CALLS = 12
"""How many of its last calls a rank can show."""
MAX_NOTE_CHARACTERS = 120
SAMPLED_BYTES = 1 << 14
FIX = (
    "let every rank compute the same: numbers from the clock, and the order of a set or of a folder, differ between "
    "processes; fix the seed, or sort; or start with --separate, which runs copies that do not train together"
)


class RankAgreement:
    """What a rank has done since the start of the view, as digests that must be equal on all ranks.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._count = 0
        self._calls: deque[str] = deque(maxlen=KEPT_CALLS)
        self._digest_of_calls = 0
        self._values = 0
        self._notes: deque[str] = deque(maxlen=KEPT_NOTES)
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._process_id = os.getpid()
        self.compares_tensors = True
        """Whether the values of tensors are compared. CPUs of several kinds may round the same numbers differently."""
        self._difference: RanksDiverged | None = None
        """What has been raised: a script that catches it must not go on, because other ranks may wait elsewhere."""

    def is_script_thread(self) -> bool:
        """Return whether this is the script's main thread, or a thread that PyTorch has started for it."""
        thread = threading.current_thread()
        is_python_thread = thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
        return not is_python_thread and os.getpid() == self._process_id

    def count_call(self, text: str, digest: int) -> None:
        """Count a call of a function; all ranks make the same calls in the same order.

        Args:
            text: Names the call and its arguments.
            digest: That of the text.
        """
        self._count += 1
        self._calls.append(text)
        self._digest_of_calls = hash((self._digest_of_calls, digest))

    def note(self, value: object, what: str) -> None:
        """Note a value that must be equal on all ranks.

        Args:
            value: A number, a text, bytes, or a tuple of these.
            what: What it is, for the error, as "the seed of torch.manual_seed".
        """
        text = repr(value)
        self._values = zlib.crc32(text.encode(), self._values)
        self._notes.append(f"{script_line(sys._getframe(1))}: {what} {text}"[:MAX_NOTE_CHARACTERS])

    def note_tensor(self, tensor: Tensor, what: object) -> None:
        """Note the values of a plain tensor on the CPU, the first time. Large tensors are sampled.

        Args:
            tensor: The tensor.
            what: What it is, for the error; or the function that takes it.
        """
        number = id(tensor)
        is_compared = self.compares_tensors and tensor.device.type == "cpu" and tensor.layout is torch.strided
        if number in self._known or not is_compared:
            return
        self._known[number] = weakref.ref(tensor, lambda _: self._known.pop(number, None))
        named = (
            what if isinstance(what, str) else f"a tensor for {getattr(what, '__name__', 'a function')}, with digest"
        )
        self.note(digest_values(tensor), named)

    def forget_tensors(self, *tensors: Tensor) -> None:
        """Keep no weak references to tensors, with which PyTorch does not swap them."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def check(self, where: str, *, generators: bool = False) -> None:
        """Compare with the other ranks.

        Args:
            where: The call in which all ranks meet, in the same words on all.
            generators: Whether to compare the states of random generators too, which takes about 40 µs.

        Raises:
            RanksDiverged: Another rank is in another call, or has made other calls, noted other values, or drawn other
                random numbers.
            RanklessError: A thread or a process that the script has started calls this.
        """
        if self._mesh.size == 1:
            return
        if not self.is_script_thread():
            raise RanklessError(
                expected="reads of divided batches in the script's main thread, in the same order on all ranks",
                found=f"{where}, in {threading.current_thread().name} of process {os.getpid()}",
                fix="read the values in the main thread, as batch.numpy() does, and pass them to the thread or process",
                where=script_line(sys._getframe(1)) or None,
            )
        if self._difference is not None:
            raise self._difference
        digests = [self._digest_of_calls & (1 << 64) - 1, self._values, *(digest_generators() if generators else ())]
        details = encode_msgpack((list(self._notes), list(self._calls), self._count))
        try:
            self._mesh.check_sync_point(
                where, names=list_names, digests=digests, details=details, describe=self._describe_difference
            )
        except RanksDiverged as error:
            self._difference = error
            raise

    def _describe_difference(self, names: Sequence[str], details: Mapping[int, bytes]) -> tuple[str, str] | None:
        """Return what differs between the notes of the ranks, and how to correct it; see `Mesh.check_sync_point`."""
        known = {
            rank: msgspec.msgpack.decode(data, type=tuple[list[str], list[str], int])
            for rank, data in details.items()
            if data
        }
        calls, values, *_ = list_names()
        found: dict[int, str] = {}
        if len(known) > 1 and values in names:
            found = find_first_difference({rank: dict(enumerate(notes)) for rank, (notes, _, _) in known.items()})
        if len(known) > 1 and calls in names and not found:
            numbered = {
                rank: {count - len(made) + place: text for place, text in enumerate(made)}
                for rank, (_, made, count) in known.items()
            }
            ended = min(count for _, _, count in known.values())
            for texts in numbered.values():
                texts.setdefault(ended, "no further call")
            found = find_first_difference(numbered)
        if found:
            return "; ".join(f"rank {rank}: {text}" for rank, text in found.items()), FIX
        return f"other {' and '.join(names)} on some ranks", FIX


def find_first_difference(texts: Mapping[int, Mapping[int, str]]) -> dict[int, str]:
    """Return by rank the texts of the first number under which all ranks have one, and not the same."""
    first, *others = texts.values()
    for number in sorted(first):
        if all(number in each for each in others) and len({each[number] for each in texts.values()}) > 1:
            return {rank: each[number] for rank, each in texts.items()}
    return {}


def list_names() -> Sequence[str]:
    """Return the names of the digests that ranks compare."""
    generators = ("random numbers of torch", "random numbers of NumPy", "random numbers of Python's random")
    return ("real numbers that PyTorch's functions take", "values", *generators)


def digest_generators() -> list[int]:
    """Return digests of the states of the process's random generators."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return [
        zlib.crc32(torch.default_generator.get_state().numpy().data),
        zlib.crc32(repr((name, rest)).encode(), zlib.crc32(numpy.asarray(keys).data)),
        hash(internal) & (1 << 64) - 1 ^ zlib.crc32(repr((version, gauss)).encode()),
    ]


def digest_values(tensor: Tensor) -> int:
    """Return a digest of the values of a tensor on the CPU; above 16 KiB of its beginning, middle and end."""
    flat = view_bytes(tensor).numpy().data
    if len(flat) <= SAMPLED_BYTES:
        return zlib.crc32(flat)
    part, digest = SAMPLED_BYTES // 4, 0
    for start in range(0, len(flat), len(flat) // 4):
        digest = zlib.crc32(flat[start : start + part], digest)
    return digest
