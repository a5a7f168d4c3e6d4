"""`oneflow.config`: the devices."""

from .env import ctrl_port
from .missing import getattr_of
from .session import current_session

__all__ = ["ctrl_port", "gpu_device_num"]

__getattr__ = getattr_of("config")


def gpu_device_num(count: int) -> None:
    """Train on `count` devices of each machine: GPUs if there are some, else CPUs.

    A script that plain `python` runs becomes the launcher of its workers, when it first needs variables.

    Raises:
        ConfigError: The number is none, or a job was called before.
    """
    current_session().set_devices(count)
