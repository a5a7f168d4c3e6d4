"""Digests of the rows that models get as input, by which `rankless verify` tells which samples a step was made of."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rankless.records.verify_recording_format import StepInputs

MOST_ROWS = 4096
"""Rows of one forward call of which a digest is kept."""


class InputDigests:
    """Collects what the outermost forward calls of a step get as input, row by row.

    A row has the same digest in every floating-point type that represents its numbers.
    """

    def __init__(self) -> None:
        self._is_wanted = False
        self._depth = 0
        self._rows: list[int] = []
        self._samples: list[int] = []

    def start(self) -> None:
        """Observe all forward calls of this process from now on."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)

    def begin_call(self, *, is_training: bool) -> None:
        """Begin an outermost forward call. Its input is the first tensor that it or an inner module is called with."""
        self._is_wanted = is_training

    def offer(self, args: Sequence[Any]) -> None:
        """Take the first tensor among a module's arguments, if the outermost call has none yet."""
        if not self._is_wanted:
            return
        tensor = next((item for item in args if isinstance(item, Tensor) and item.dim() > 0), None)
        if tensor is None:
            return
        self._is_wanted = False
        self._rows.append(tensor.shape[0])
        rows = tensor.detach()[:MOST_ROWS].cpu()
        rows = (rows.double() if rows.is_floating_point() else rows).reshape(len(rows), -1).contiguous()
        for row in rows.view(torch.uint8) if rows.numel() else ():
            self._samples.append(int.from_bytes(blake2b(row.numpy().tobytes(), digest_size=7).digest(), "little"))

    def take(self, *, learning_rates: tuple[float, ...] = ()) -> StepInputs:
        """Return the inputs since the last step, and begin anew."""
        inputs = StepInputs(tuple(self._rows), tuple(self._samples), learning_rates)
        self._rows, self._samples = [], []
        return inputs

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._depth == 0:
            self.begin_call(is_training=torch.is_grad_enabled() and module.training)
        self._depth += 1
        self.offer(args)

    def _after_forward(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        self._depth -= 1
