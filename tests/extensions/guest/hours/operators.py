import math

import torch
from torch import Tensor

from rankless.compiler.rules.extension_operators import ExtensionOperator, Lookup
from rankless.compiler.rules.pattern import split_strategies


@torch.library.custom_op("hours::angles", mutates_args=())
def angles(weight: Tensor, hours: Tensor, face: int) -> Tensor:
    return look_up(weight, hours, face)


@angles.register_fake
def _(weight, hours, face):
    return weight.new_empty((*hours.shape, 2))


@Lookup
def look_up(weight, hours, _face):
    angle = (hours % 12).to(weight.dtype) * (math.pi / 6)
    return torch.stack([angle.sin(), angle.cos()], -1)


OPERATORS = {
    torch.ops.hours.angles.default: ExtensionOperator(
        rule=lambda call: split_strategies(call, ".,a->a."), local=look_up
    )
}
