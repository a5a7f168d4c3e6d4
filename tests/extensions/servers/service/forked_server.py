"""What the process of a server runs that is forked."""

import os
import sys
from multiprocessing.reduction import DupFd

from msgspec.structs import replace

from rankless.extensions.servers.config import ServerConfig, server_environment
from rankless.extensions.servers.service import process


class ServerStart:
    """The start of a server. When it is pickled for the process, its descriptors are sent along.

    Args:
        config: The configuration of the server.
        descriptors: Those that its configuration names.
        log: The descriptor of the file for its messages.
    """

    def __init__(self, config: ServerConfig, descriptors: dict[str, int], log: int) -> None:
        self._config, self._descriptors, self._log = config, descriptors, log

    def __getstate__(self) -> dict[str, object]:
        sent = {name: DupFd(descriptor) for name, descriptor in self._descriptors.items()}
        return {"_config": self._config, "_descriptors": sent, "_log": DupFd(self._log)}

    def __call__(self) -> None:
        config = replace(self._config, **{name: sent.detach() for name, sent in self._descriptors.items()})
        os.dup2(self._log.detach(), sys.stderr.fileno())
        os.environ.update(server_environment(config))
        sys.exit(process.main())
