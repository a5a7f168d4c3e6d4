"""A stand-in for the process of a parameter server, for tests of how servers start and end.

It keeps the contract of `rankless.extensions.servers.service.process` and serves nothing.
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

def serve(durable=""):
    address = config["address"]
    if address.startswith("ipc://"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.removeprefix("ipc://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        listener = socket.create_server((host, int(port)))
    listener.listen()
    print("server", index, "serves", file=sys.stderr, flush=True)
    os.write(config["ready_descriptor"], f"ready {address}{durable}\\n".encode())
    return listener

def answer():
    '''Serve, with a count of the processes of this server that its memory holds.'''
    count = int(os.pread(config["memory_descriptor"], 20, 0) or 0) + 1
    os.pwrite(config["memory_descriptor"], str(count).encode(), 0)
    listener = serve(" durable")
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(f"{config['incarnation']} {count} {os.getpid()}".encode())

signal.signal(signal.SIGTERM, stop)
with open(f"server{index}.pid", "w") as file:
    file.write(f"{os.getpid()}\\n")
"""
"""The start of a stand-in, in the folder of the run; `serve()` binds its address and writes that it is ready."""
SERVE = SERVER + "listener = serve()\nwhile True:\n    signal.pause()\n"
DURABLE = SERVER + "answer()\n"
"""A stand-in that says that it can go on after its death, and answers each connection with one line."""
ASK = """
import json, os, signal, socket, time

servers = json.loads(os.environ["RANKLESS_WORKER_PLAN"])["roles"].get("servers")
addresses = [] if servers is None else servers["addresses"]

def connect(address):
    if address.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("ipc://"))
        return connection
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))

def ask(server, incarnation=0):
    '''Return the incarnation of a server, the count in its memory, and its process, once it has that incarnation.'''
    while True:
        try:
            with connect(addresses[server]) as connection:
                found = [int(word) for word in connection.makefile().read().split()]
            if found and found[0] >= incarnation:
                return found
        except OSError:
            pass
        time.sleep(0.01)

def kill(server, number=signal.SIGKILL):
    '''Send a signal to a server, and return the number of its next incarnation.'''
    incarnation, _, process_id = ask(server)
    os.kill(process_id, number)
    return incarnation + 1

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""
"""The start of a worker's script that talks to such stand-ins."""
_SITE = """
import importlib.util, sys

class StandIn:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "rankless.extensions.servers.service":
            return importlib.util.spec_from_file_location(
                name, {folder!r} + "/__init__.py", submodule_search_locations=[{folder!r}, path[0] + "/service"]
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
