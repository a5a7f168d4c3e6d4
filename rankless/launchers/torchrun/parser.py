"""The options of torchrun and of `python -m torch.distributed.launch`, word for word."""

import argparse

from rankless.config.environment import snapshot
from rankless.launchers.option_spellings import Flag, declare_script, taken
from rankless.launchers.torchrun.options import TorchrunFlags

FLAGS = (
    Flag(name="nnodes", metavar="N", help="how many hosts (1); the same line is typed on each"),
    Flag(name="nproc-per-node", metavar="N", help="how many workers: a number, or auto, gpu, cpu (1)"),
    Flag(name="rdzv-backend", metavar="NAME", help="static: hosts are numbered by --node-rank; c10d: as they come"),
    Flag(name="rdzv-endpoint", metavar="HOST:PORT", help="where hosts meet: the first host"),
    Flag(name="rdzv-id", metavar="ID", help="TORCHELASTIC_RUN_ID, and the beginning of the log folder's name"),
    Flag(name="rdzv-conf", metavar="K=V,…", help="join_timeout=S: how long to wait for hosts (60)"),
    Flag(name="standalone", kind=None, help="one host, a free port; --rdzv-* are ignored"),
    Flag(name="max-restarts", kind=int, metavar="N", help="accepted; a run that fails ends"),
    Flag(name="monitor-interval", kind=float, metavar="S", help="not needed: ends of workers are noticed at once"),
    Flag(
        name="start-method",
        choices=("spawn", "fork", "forkserver"),
        help="fork: from a parent that has imported torch once (default); else plain processes",
    ),
    Flag(name="event-log-handler", metavar="NAME", help="accepted and not heeded"),
    Flag(name="role", metavar="NAME", help="ROLE_NAME (default)"),
    Flag(name="module", short="-m", kind=None, help="the script is a module, as with python -m"),
    Flag(name="no-python", kind=None, help="the script is any command"),
    Flag(name="run-path", kind=None, help="run the script as runpy.run_path does, as is always done"),
    Flag(name="log-dir", metavar="DIR", help="where logs of runs go (log)"),
    Flag(name="redirects", short="-r", metavar="WHICH", help="keep 1: standard output, 2: error, 3: both to the logs"),
    Flag(name="tee", short="-t", metavar="WHICH", help="show it with each line's rank before it; WHICH as above"),
    Flag(name="local-ranks-filter", metavar="0,1", help="show only these ranks' output"),
    Flag(name="duplicate-stdout-filters", metavar="TEXTS", help="copy lines with these to filtered_stdout.log"),
    Flag(name="duplicate-stderr-filters", metavar="TEXTS", help="copy lines with these to filtered_stderr.log"),
    Flag(name="node-rank", kind=int, metavar="N", help="this host's number; 0 is the master's host"),
    Flag(name="master-addr", metavar="HOST", help="an address of host 0 (127.0.0.1)"),
    Flag(
        name="master-port",
        kind=int,
        metavar="PORT",
        help="MASTER_PORT (a free one); of several hosts, where they meet (29500)",
    ),
    Flag(name="local-addr", metavar="HOST", help="not needed on one host"),
    Flag(name="logs-specs", metavar="NAME", in_environment=False, help="accepted and not heeded"),
    Flag(
        name="numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        in_environment=False,
        help="accepted and not heeded",
    ),
    Flag(
        name="signals-to-handle", metavar="NAMES", help="hand these on to the workers (SIGTERM,SIGINT,SIGHUP,SIGQUIT)"
    ),
    Flag(name="shutdown-timeout", kind=int, metavar="S", help="how long workers may take to end when asked to (30)"),
    Flag(name="virtual-local-rank", kind=None, help="each worker sees its GPU alone, with LOCAL_RANK 0"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Defaults come from PET_ variables; what nobody gives is None, or False for a switch."""
    given = _defaults()
    for flag in FLAGS:
        value = given.get(flag.dest) if flag.in_environment else None
        if flag.kind is None:
            parser.add_argument(
                *flag.spellings,
                dest=flag.dest,
                action="store_true",
                default=_switch(parser, flag, value),
                help=flag.help,
            )
        else:
            flag.declare(parser, default=value)
    parser.add_argument("--insecure", action="store_true", help="ours: several hosts need no RANKLESS_TOKEN_FILE")
    declare_script(parser)


def take_flags(arguments: argparse.Namespace) -> TorchrunFlags:
    """What was given."""
    return taken(arguments, TorchrunFlags)


def _switch(parser: argparse.ArgumentParser, flag: Flag, value: str | None) -> bool:
    try:
        return bool(int(value or "0"))
    except ValueError:
        parser.error(f"PET_{flag.dest.upper()}={value}: expected 0 or 1")


def _defaults() -> dict[str, str]:
    """Return what PET_ variables give for options, by option, as `nproc_per_node`."""
    prefix = "PET_"
    return {name.removeprefix(prefix).lower(): value for name, value in snapshot().items() if name.startswith(prefix)}
