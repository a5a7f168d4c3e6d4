"""The options of torchrun and of `python -m torch.distributed.launch`, word for word."""

import argparse

import msgspec

from rankless.cli.launcher_option_spellings import Flag, declare_script, parse_flags
from rankless.config.environment import snapshot


class TorchrunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The options given on the command line or by PET_ variables; None if an option is not given."""

    nnodes: str | None = None
    nproc_per_node: str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    standalone: bool = False
    max_restarts: int | None = None
    monitor_interval: float | None = None
    start_method: str | None = None
    event_log_handler: str | None = None
    role: str | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str | None = None
    redirects: str | None = None
    tee: str | None = None
    local_ranks_filter: str | None = None
    duplicate_stdout_filters: str | None = None
    duplicate_stderr_filters: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: str | None = None
    signals_to_handle: str | None = None
    shutdown_timeout: int | None = None
    virtual_local_rank: bool = False
    use_env: bool = True
    insecure: bool = False
    """Rankless only: several hosts need no token."""
    training_script: tuple[str, ...] = ()
    """The script, module or command, and its own arguments."""


_ACCEPTED = "Accepted for compatibility and ignored."

FLAGS = (
    Flag(name="nnodes", metavar="N", help="Number of hosts; run the same command on each. Default: 1."),
    Flag(name="nproc-per-node", metavar="N", help="Workers on each host: a number, or auto, gpu or cpu. Default: 1."),
    Flag(
        name="rdzv-backend",
        metavar="NAME",
        help="static: --node-rank numbers the hosts; c10d: they get numbers in order of arrival. Default: static.",
    ),
    Flag(name="rdzv-endpoint", metavar="HOST:PORT", help="Address and port of the first host, for the rendezvous."),
    Flag(
        name="rdzv-id",
        metavar="ID",
        help="Value of TORCHELASTIC_RUN_ID, and prefix of the log folder's name. Default: a random ID.",
    ),
    Flag(name="rdzv-conf", metavar="K=V,…", help="join_timeout=S: seconds to wait for the other hosts. Default: 60."),
    Flag(name="standalone", kind=None, help="Run on one host with a free port, and ignore the --rdzv-* options."),
    Flag(
        name="max-restarts", kind=int, metavar="N", help="Accepted for compatibility; the first failure ends the job."
    ),
    Flag(
        name="monitor-interval",
        kind=float,
        metavar="S",
        help="Accepted for compatibility; the agent detects the end of a worker at once.",
    ),
    Flag(
        name="start-method",
        choices=("spawn", "fork", "forkserver"),
        help="fork: start workers from a fork server with torch preloaded; otherwise plain processes. Default: fork.",
    ),
    Flag(name="event-log-handler", metavar="NAME", help=_ACCEPTED),
    Flag(name="role", metavar="NAME", help="Value of ROLE_NAME. Default: default."),
    Flag(name="module", short="-m", kind=None, help="Run the script as a module, as python -m does."),
    Flag(name="no-python", kind=None, help="Run the script as a command, without Python."),
    Flag(
        name="run-path", kind=None, help="Accepted for compatibility; scripts always run as runpy.run_path runs them."
    ),
    Flag(name="log-dir", metavar="DIR", help="Folder for the logs of runs. Default: log."),
    Flag(
        name="redirects",
        short="-r",
        metavar="WHICH",
        help="Write to the logs only 1: standard output, 2: standard error, 3: both; or RANK:N,…. Default: 0.",
    ),
    Flag(
        name="tee",
        short="-t",
        metavar="WHICH",
        help="Show on the terminal too, with the rank before each line; values as for --redirects. Default: 0.",
    ),
    Flag(name="local-ranks-filter", metavar="0,1", help="Show the output of these local ranks only. Default: all."),
    Flag(
        name="duplicate-stdout-filters",
        metavar="TEXTS",
        help="Copy lines of standard output that contain one of these texts to filtered_stdout.log.",
    ),
    Flag(
        name="duplicate-stderr-filters",
        metavar="TEXTS",
        help="Copy lines of standard error that contain one of these texts to filtered_stderr.log.",
    ),
    Flag(name="node-rank", kind=int, metavar="N", help="Number of this host; host 0 is the master. Default: 0."),
    Flag(name="master-addr", metavar="HOST", help="Address of host 0. Default: 127.0.0.1."),
    Flag(
        name="master-port",
        kind=int,
        metavar="PORT",
        help="Value of MASTER_PORT, and port of the rendezvous. Default: a free port, or 29500 on several hosts.",
    ),
    Flag(name="local-addr", metavar="HOST", help="Address of this host; not needed on one host."),
    Flag(name="logs-specs", metavar="NAME", in_environment=False, help=_ACCEPTED),
    Flag(
        name="numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        in_environment=False,
        help=_ACCEPTED,
    ),
    Flag(
        name="signals-to-handle",
        metavar="NAMES",
        help="Signals to forward to the workers. Default: SIGTERM,SIGINT,SIGHUP,SIGQUIT.",
    ),
    Flag(
        name="shutdown-timeout",
        kind=int,
        metavar="S",
        help="Seconds for which workers may run on after a request to end. Default: 30.",
    ),
    Flag(name="virtual-local-rank", kind=None, help="Give each worker a view of its own GPU only, with LOCAL_RANK=0."),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options. PET_ variables give defaults; others are None, or False for a switch."""
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
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="Rankless only: several hosts join without a shared token; every program that reaches the port may join.",
    )
    declare_script(parser)


def read_flags(arguments: argparse.Namespace) -> TorchrunFlags:
    """Return the parsed options."""
    return parse_flags(arguments, TorchrunFlags)


def _switch(parser: argparse.ArgumentParser, flag: Flag, value: str | None) -> bool:
    try:
        return bool(int(value or "0"))
    except ValueError:
        parser.error(f"PET_{flag.dest.upper()}={value}: expected 0 or 1")


def _defaults() -> dict[str, str]:
    """Return what PET_ variables give for options, by option, as `nproc_per_node`."""
    prefix = "PET_"
    return {name.removeprefix(prefix).lower(): value for name, value in snapshot().items() if name.startswith(prefix)}
