"""Every socket on which a process of a run listens, and every file that Rankless makes for itself, as one table.

`docs/guides/security.md` shows the table, and a test compares it with what the system shows of runs of each kind.
"""

from rankless.config.extensions import ListeningSocket, PrivateFile, list_extensions

OWN_KINDS = (
    "one host",
    "several hosts",
    "spawn",
    "verify",
    "doctor",
)
"""The kinds of runs of Rankless's own commands."""
ADDED_KINDS = tuple(kind for extension in list_extensions() for kind in extension.run_kinds)
"""Those that extensions add."""
FOREIGN_KINDS = tuple(kind for extension in list_extensions() if extension.launcher for kind in extension.run_kinds)
"""Those of other launchers among them, whose logs have the modes that their users expect."""
SPANNING_KINDS = tuple(kind for extension in list_extensions() for kind in extension.spanning_kinds)
ALL_KINDS = (*OWN_KINDS, *ADDED_KINDS)


_WITH_AGENTS = tuple(kind for kind in ALL_KINDS if kind not in ("spawn", "doctor"))
_TOKEN = "an HMAC of the run's token over a challenge; the token is never sent"
_OWN = tuple(kind for kind in _WITH_AGENTS if kind not in FOREIGN_KINDS)
_SPANNING = ("several hosts", *SPANNING_KINDS)

SOCKETS = (
    ListeningSocket(
        name="store of all ranks",
        kinds=_WITH_AGENTS,
        holder="agent",
        address="127.0.0.1",
        on_hosts="host 0's address, a free port",
        lasts="the run",
        access=_TOKEN,
    ),
    ListeningSocket(
        name="port for other hosts",
        kinds=_SPANNING,
        holder="agent",
        address="",
        on_hosts="host 0's address, `--port`",
        lasts="the run",
        access="each message has an HMAC of the run's token; it cannot be repeated",
    ),
    ListeningSocket(
        name="test of ports, and speed",
        kinds=(*_SPANNING, "doctor"),
        holder="agent",
        address="",
        on_hosts="each host's address, a free port",
        lasts="seconds, before the start",
        access="a secret of this test, which the hosts get over the port for other hosts or ssh",
    ),
    ListeningSocket(
        name="shared memory of a process group",
        holder="worker",
        address="@rankless-",
        on_hosts="the same name on each host",
        lasts="until the ranks of the host have opened it",
        access="a process of the same user (SO_PEERCRED)",
    ),
    ListeningSocket(
        name="Gloo's connections",
        holder="worker",
        address="127.0.0.1",
        on_hosts="each host's address, free ports",
        lasts="the process group",
        access="**nothing**: Gloo has no authentication. On one host only `--backend gloo` and groups of a part of the "
        "ranks have them. NCCL's are alike",
    ),
    ListeningSocket(
        name="comparison of calls between hosts",
        holder="worker",
        address="",
        on_hosts="all addresses of rank 0's host, a free port",
        lasts="at most 10 s, when jobs start",
        access="a token that ranks exchange in their group; it is sent as it is",
    ),
    ListeningSocket(
        name="store that a script opens itself",
        holder="worker",
        address="*",
        on_hosts="all addresses",
        lasts="what the script says",
        access="**nothing**: it is PyTorch's own. So are the store of `rankless.spawn` (127.0.0.1), of "
        '`rankless.init("tcp://…")` and of ranks that other launchers start (the given address), and the '
        "doctor's (seconds)",
    ),
    *(socket for extension in list_extensions() for socket in extension.sockets),
)

FILES = (
    PrivateFile(name="log folder of a run", pattern=".", mode=0o700, kinds=_OWN),
    PrivateFile(name="output of workers", pattern="rank*.log", mode=0o600, kinds=_OWN),
    PrivateFile(name="summary", pattern="run.json", mode=0o600),
    PrivateFile(name="errors of the workers' parent", pattern="parent*.log", mode=0o600),
    PrivateFile(name="stacks of a hang", pattern="stacks*", mode=0o600),
    PrivateFile(name="a token that ssh has brought", pattern="~/.cache/rankless/token-*", mode=0o600),
    *(file for extension in list_extensions() for file in extension.files),
)


def format_sockets() -> str:
    """Return the sockets as a table in Markdown."""
    rows = [
        "| socket | runs | held by | one host | several hosts | how long | a client needs |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in SOCKETS:
        kinds = ", ".join(each.kinds) or "all"
        where = f"`{each.address}`" if each.address else "-"
        cells = (each.name, kinds, each.holder, where, each.on_hosts or "-", each.lasts, each.access)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def format_files() -> str:
    """Return the files as a table in Markdown."""
    rows = ["| file | path | mode | runs |", "|---|---|---|---|"]
    for each in FILES:
        kinds = ", ".join(each.kinds) or "all"
        rows.append(f"| {each.name} | `{each.pattern}` | {each.mode:04o} | {kinds} |")
    return "\n".join(rows)
