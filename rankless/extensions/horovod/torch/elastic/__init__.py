"""`hvd.elastic`: a training function that continues when workers change, its state, and a sampler.

Enters: the user's function and its state. Leaves: what the function returns. Scripts call it as `hvd.elastic.run`.
"""

from collections.abc import Callable
from typing import Any

from rankless.extensions.horovod.common.basics import init, shutdown
from rankless.extensions.horovod.common.elastic import ObjectState, State, run_fn
from rankless.extensions.horovod.torch.elastic.sampler import ElasticSampler
from rankless.extensions.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a `State`.

    The function is called again whenever the workers change. If a worker has failed, it gets the state of the last
    commit. If hosts have been added or removed, it gets the current state.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
