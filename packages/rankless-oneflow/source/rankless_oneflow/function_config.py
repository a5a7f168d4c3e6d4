"""`oneflow.function_config`: the settings of a job."""

from typing import Any, get_args

import torch

from .missing import getattr_of, refuse
from .scope import View

_refuse_setting = getattr_of("function_config()")


class FunctionConfig:
    """The settings of a job. `flow.function_config()` makes them."""

    def __init__(self) -> None:
        self.view: View = "consistent"
        self.dtype = torch.float32

    def default_data_type(self, dtype: torch.dtype) -> None:
        """Set the dtype of tensors that the job makes without one, such as `flow.float`."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise refuse("default_data_type", f"{dtype!r}", "pass flow.float or flow.double")
        self.dtype = dtype

    def default_logical_view(self, view: View) -> None:
        """Set the view: `flow.scope.consistent_view()` or `flow.scope.mirrored_view()`."""
        if view not in get_args(View):
            raise refuse("default_logical_view", f"{view!r}", "pass flow.scope.mirrored_view(), with parentheses")
        self.view = view

    def __getattr__(self, name: str) -> Any:
        return _refuse_setting(name)


def function_config() -> FunctionConfig:
    """Return new settings of a job: the consistent view, and float32."""
    return FunctionConfig()
