"""`oneflow.train`: checkpoints."""

from .missing import getattr_of
from .session import current_session

__getattr__ = getattr_of("train")


class CheckPoint:
    """Gives the variables of all jobs their values, and saves and loads them.

    A checkpoint is a folder of `rankless.save`, with each variable under its name, such as "dense1-weight".
    """

    def init(self) -> None:
        """Give all variables their initial values, which depend on their names alone."""
        current_session().initialize()

    def save(self, path: str) -> None:
        """Write variables, states of optimizers and numbers of steps to the folder `path`. A checkpoint there goes.

        Raises CheckpointError if the folder cannot be written, ConfigError if the variables have no values yet.
        """
        current_session().save(path)

    def load(self, path: str) -> None:
        """Read the variables and train jobs of this script from the folder `path`.

        Raises CheckpointError if there is no checkpoint, or if it lacks a variable or a train job of this script.
        """
        current_session().load(path)
