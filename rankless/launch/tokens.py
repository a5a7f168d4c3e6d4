"""The job's token, by which its hosts know each other: never on a command line, never sent on the control channel."""

import secrets

from rankless.errors import PlanError
from rankless.plan.environment import user_token_file
from rankless.plan.run_plan import Company

LEAST_BYTES = 16
NO_TOKEN = b""


def token_of(company: Company) -> bytes:
    """The token: a new one where ssh carries it to the others, else that of the file RANKLESS_TOKEN_FILE.

    Raises PlanError where there is neither, and the job was not said to be insecure.
    """
    path = user_token_file()
    if path is not None:
        return read_token(path)
    if company.insecure:
        return NO_TOKEN
    if company.way == "ssh":
        return secrets.token_bytes(32)
    raise PlanError(
        expected="a token that all hosts of the job share, for whoever starts it by hand",
        found="no RANKLESS_TOKEN_FILE in the environment",
        fix="head -c 32 /dev/urandom > token; chmod 600 token; bring it to every host and set RANKLESS_TOKEN_FILE to "
        "its path; or, in a network that you trust, --insecure (insecure=True)",
    )


def read_token(path: str) -> bytes:
    """The token in a file. Raises PlanError for one that cannot be read, or is too short."""
    try:
        with open(path, "rb") as file:
            token = file.read(4096).strip()
    except OSError as error:
        raise PlanError(
            expected="the file that RANKLESS_TOKEN_FILE names", found=f"{path}: {error.strerror}", fix="check the path"
        ) from None
    if len(token) < LEAST_BYTES:
        raise PlanError(
            expected=f"a token of at least {LEAST_BYTES} bytes in {path}",
            found=f"{len(token)} bytes",
            fix=f"head -c 32 /dev/urandom > {path}, and bring it to every host",
        )
    return token
