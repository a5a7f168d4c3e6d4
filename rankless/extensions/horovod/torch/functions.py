"""Broadcasts of parameters, optimizer state and objects, under the module name that Horovod has for them."""

from rankless.extensions.horovod.torch.objects import allgather_object, broadcast_object
from rankless.extensions.horovod.torch.optimizer_state import broadcast_optimizer_state
from rankless.extensions.horovod.torch.parameter_broadcast import broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
