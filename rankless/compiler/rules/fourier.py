"""Rules for Fourier transforms: every dim that is not transformed can be sharded."""

from typing import Any

import torch

from rankless.compiler.rules.pattern import make_letters, make_pattern_rule, require_rows
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, logical_shape

aten = torch.ops.aten


def transform_pattern(call: OperatorCall) -> str:
    """Return the pattern of a transform of some dims."""
    text = make_letters(len(logical_shape(call.inputs[0])), call.argument("dim"))
    return f"{text}->{text}"


RULES: dict[Any, ShardingRule] = dict.fromkeys(
    (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default),
    require_rows(make_pattern_rule(transform_pattern)),
)
