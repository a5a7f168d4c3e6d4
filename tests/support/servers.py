"""A stand-in for the process of a parameter server, for tests of how servers start and end.

It keeps the contract of `rankless.parameter_server.servers.process` and serves nothing.
"""

import os
from pathlib import Path

SERVER = """
import json, os, signal, socket, sys

config = json.loads(os.environ["RANKLESS_SERVER"])
index = config["index"]

def stop(*_):
    print("server", index, "ends", file=sys.stderr, flush=True)
    sys.exit(0)

def serve():
    address = config["address"]
    if address.startswith("ipc://"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.removeprefix("ipc://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        listener = socket.create_server((host, int(port)))
    listener.listen()
    print("server", index, "serves", file=sys.stderr, flush=True)
    os.write(config["ready_descriptor"], f"ready {address}\\n".encode())
    return listener

signal.signal(signal.SIGTERM, stop)
with open(f"server{index}.pid", "w") as file:
    file.write(f"{os.getpid()}\\n")
"""
"""The start of a stand-in, in the folder of the run; `serve()` binds its address and writes that it is ready."""
SERVE = SERVER + "listener = serve()\nwhile True:\n    signal.pause()\n"
_SITE = """
import importlib.util, sys

class StandIn:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "rankless.parameter_server.servers":
            return importlib.util.spec_from_file_location(
                name, {folder!r} + "/__init__.py", submodule_search_locations=[{folder!r}]
            )

sys.meta_path.insert(0, StandIn)
"""


def install_server(folder: Path, text: str = SERVE) -> dict[str, str]:
    """Write a stand-in of this text below `folder`, and return the variables with which servers are such processes."""
    package = folder / "stand_in" / "servers"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "process.py").write_text(text)
    (package.parent / "sitecustomize.py").write_text(_SITE.format(folder=str(package)))
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])}
