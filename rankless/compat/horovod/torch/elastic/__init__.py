"""`hvd.elastic`: a training function that goes on when workers come and go, its state, and a sampler.

Enters: the user's function and its state. Leaves: what the function returns. Scripts call it as `hvd.elastic.run`.
"""

from collections.abc import Callable
from typing import Any

from rankless.compat.horovod.common.elastic import ObjectState, State, run_fn
from rankless.compat.horovod.torch.basics import init, shutdown
from rankless.compat.horovod.torch.elastic.sampler import ElasticSampler
from rankless.compat.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a `State`.

    When a worker fails, it is called again with the state of the last commit; when hosts come or go, with the state of
    the moment; each time with the workers that are there then.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
