"""The exceptions of Horovod's API, below the engine that raises them. Scripts import them from `common.exceptions`."""

MODULE = "rankless.extensions.horovod.common.exceptions"
"""Where scripts import the exceptions from, and what tracebacks show: Horovod's place of import."""


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank: the ranks disagree, or one is gone. Elastic training restores its state."""

    __module__ = MODULE


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or will be removed. Elastic training continues with the current state.

    Args:
        skip_sync: Whether the state need not be synchronized, because hosts are only removed. Default False.
    """

    __module__ = MODULE

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Two parts of an installation have different versions."""

    __module__ = MODULE

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"Framework {name} installed with version {installed_version} but found version {version}.")
        self.name = name
        self.version = version
        self.installed_version = installed_version
