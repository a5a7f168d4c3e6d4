"""The state of a PyTorch training: models, optimizers, schedulers and samplers with handlers, and plain objects."""

import copy
from typing import Any

import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.elastic import ObjectState
from rankless.extensions.horovod.torch.elastic.sampler import ElasticSampler
from rankless.extensions.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """Saves, restores and synchronizes one value of a state. Users derive their own handlers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the value's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's value to all ranks."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Set another value, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles values with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Keep a copy of the state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the saved copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Copy rank 0's state to all ranks, and save it: a failure before the next commit restores it."""
        self.broadcast()
        self.save()

    def broadcast(self) -> None:
        """Copy rank 0's state to all ranks."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(_StateDictHandler):
    """Handles a model."""

    def broadcast(self) -> None:
        """Broadcast the state tensor by tensor."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Handles an optimizer."""

    def broadcast(self) -> None:
        """Broadcast the state tensor by tensor."""
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(_StateDictHandler):
    """Handles a learning rate scheduler."""


class SamplerStateHandler(_StateDictHandler):
    """Handles an `ElasticSampler`."""


class TorchState(ObjectState):
    """The state of a PyTorch training. Each argument becomes an attribute.

    A handler saves, restores and synchronizes the values of its type. All other values are plain Python objects.

    Args:
        model: The model, if any.
        optimizer: The optimizer, if any.
        kwargs: Any other values.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: handler for name, value in values.items() if (handler := _make_handler(value)) is not None}
        self._handlers: dict[str, StateHandler] = handlers
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
        plain_values = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=_rank, **plain_values)

    def save(self) -> None:
        """Save all current values."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the state that was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's values to all ranks."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Make samplers divide their samples among the current ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the types with handlers, in the order in which they are tried, and the handlers."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry of handlers."""
    global _handler_registry  # Horovod's API has one registry
    _handler_registry = registry


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def _make_handler(value: Any) -> StateHandler | None:
    handler_classes = (handler for kind, handler in _handler_registry if isinstance(value, kind))
    found = next(handler_classes, None)
    return None if found is None else found(value)


def _rank() -> int:
    return context.current().world.rank
