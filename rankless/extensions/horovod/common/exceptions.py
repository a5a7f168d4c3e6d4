"""The exceptions that Horovod's calls raise, under the module name from which scripts import them."""

from rankless.extensions.horovod.exceptions import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
