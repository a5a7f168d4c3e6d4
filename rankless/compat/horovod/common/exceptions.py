"""What Horovod's calls raise: its names, and its place of import."""


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank: ranks disagree, or one is gone. Elastic training restores and goes on."""


class HostsUpdatedInterrupt(RuntimeError):
    """Workers have come or are to go; elastic training goes on with the state as it is.

    `skip_sync`: whether the state need not be sent around, since workers only go.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Two parts of an installation have different versions."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"Framework {name} installed with version {installed_version} but found version {version}.")
        self.name = name
        self.version = version
        self.installed_version = installed_version
