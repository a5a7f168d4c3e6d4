"""The environment variables that a user chooses for all hosts of a job."""

from collections.abc import Mapping, Sequence

from rankless.config.environment import TOKEN_FILE, WORKER_PLAN
from rankless.errors import ConfigError

_EACH_WORKERS_OWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    TOKEN_FILE,
    WORKER_PLAN,
)


def chosen_variables(given: Sequence[str], here: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--env NAME`, with its value in `here`, and of `--env NAME=VALUE`.

    Raises `ConfigError` for an invalid name, an unset variable, and one that every worker gets for itself.
    """
    chosen = {}
    for item in given:
        name, has_value, value = item.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(
                expected="--env NAME or --env NAME=VALUE", found=f"--env {item}", fix="as in: --env WANDB_MODE=offline"
            )
        if name in _EACH_WORKERS_OWN:
            raise ConfigError(
                expected="--env with a variable that may be the same everywhere",
                found=f"--env {item}, which each worker or host gets for itself",
                fix="omit it",
            )
        if not has_value and name not in here:
            raise ConfigError(
                expected=f"--env {name} with {name} set here",
                found="no such variable",
                fix=f"export {name}, or write --env {name}=VALUE",
            )
        chosen[name] = value if has_value else here[name]
    return chosen
