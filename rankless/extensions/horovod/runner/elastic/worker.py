"""How hosts change, and who is told, under the module name from which tools import them."""

from rankless.extensions.horovod.common.elastic import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
