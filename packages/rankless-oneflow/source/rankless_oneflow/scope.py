"""`oneflow.scope`: the two views of several devices."""

from typing import Literal

from .missing import getattr_of

__getattr__ = getattr_of("scope")

View = Literal["consistent", "mirrored"]


def consistent_view() -> View:
    """Return the view in which a job takes and returns whole batches: the default."""
    return "consistent"


def mirrored_view() -> View:
    """Return the view in which a job takes and returns lists with one element for each device."""
    return "mirrored"
