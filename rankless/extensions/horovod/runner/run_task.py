"""The program of each process of `horovod.run`: `python -m … HOST PORT`."""

import sys
import traceback
from multiprocessing.connection import Client

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from rankless.config import environment
from rankless.extensions.horovodrun.launched_worker import horovod_variables

FUNCTION_KEY = "RANKLESS_FUNCTION_KEY"
"""The environment variable with the key of the function."""


def main(host: str, port: int) -> None:
    """Receive the function, call it, and send its result or its traceback."""
    family = "AF_INET6" if ":" in host else "AF_INET"
    with Client((host, port), family=family, authkey=bytes.fromhex(environment.take(FUNCTION_KEY))) as connection:
        path, call = cloudpickle.loads(connection.recv_bytes())
        sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
        function, args, kwargs = cloudpickle.loads(call)
        rank = int(horovod_variables()["RANK"])
        try:
            data = cloudpickle.dumps(("result", rank, function(*args, **kwargs)))
        except BaseException:
            connection.send_bytes(cloudpickle.dumps(("error", rank, traceback.format_exc())))
            connection.recv_bytes()
            raise
        connection.send_bytes(data)
        connection.recv_bytes()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
