"""The options of Paddle's fleetrun, and of `python -m paddle.distributed.launch`, word for word."""

import argparse

import msgspec

from rankless.config.environment import snapshot, whole_number
from rankless.launchers.fleetrun.options import FleetrunFlags
from rankless.launchers.option_spellings import Flag, declare_script, taken

_SERVERS = "parameter servers: not there yet"
_ACCEPTED = "accepted and not heeded"

_VARIABLES = {
    "PADDLE_DEVICES": "devices",
    "PADDLE_NPROC_PER_NODE": "nproc_per_node",
    "PADDLE_IPS": "ips",
    "PADDLE_NNODES": "nnodes",
    "PADDLE_MASTER": "master",
    "PADDLE_RANK": "rank",
    "PADDLE_START_PORT": "start_port",
    "PADDLE_LOG_DIR": "log_dir",
    "PADDLE_LOG_LEVEL": "log_level",
    "PADDLE_LOG_OVERWRITE": "log_overwrite",
    "PADDLE_JOB_ID": "job_id",
    "PADDLE_RUN_MODE": "run_mode",
    "PADDLE_MAX_RESTART": "max_restart",
    "PADDLE_ELASTIC_LEVEL": "elastic_level",
    "PADDLE_ELASTIC_TIMEOUT": "elastic_timeout",
    "PADDLE_SORT_IP": "sort_ip",
    "PADDLE_WITH_GLOO": "with_gloo",
    "PADDLE_SERVER_NUM": "server_num",
    "PADDLE_SERVERS_ENDPOINTS": "servers",
    "PADDLE_TRAINER_NUM": "worker_num",
    "PADDLE_TRAINERS_ENDPOINTS": "workers",
    "PADDLE_GLOO_PORT": "gloo_port",
    "PADDLE_AUTO_PARALLEL_CONFIG": "auto_parallel_config",
    "PADDLE_AUTO_CLUSTER": "auto_cluster_config",
}
"""The option for which each variable stands, as Paddle's launcher reads them."""

FLAGS = (
    Flag(
        name="devices", also=("gpus", "selected-gpus"), metavar="0,1", help="GPUs, one process for each (all visible)"
    ),
    Flag(
        name="nproc-per-node",
        kind=int,
        metavar="N",
        help="how many processes on each host; fewer than GPUs share them out; without GPUs they run on the CPU (1)",
    ),
    Flag(name="ips", metavar="A,B", help="the hosts; the same line is typed on each (127.0.0.1)"),
    Flag(name="nnodes", metavar="N", help="how many hosts, where --master stands in the place of --ips"),
    Flag(name="master", metavar="A:PORT", help="the first host; with --ips: the port where hosts meet (9988)"),
    Flag(name="rank", kind=int, metavar="K", help="this host's number, 0 is the master's (as they come)"),
    Flag(name="host", metavar="A", help="not needed: a host is found by its own addresses"),
    Flag(name="start-port", kind=int, metavar="PORT", help="the first of PADDLE_TRAINER_ENDPOINTS (a free one, 6070)"),
    Flag(name="log-dir", metavar="DIR", help="where workerlog.0, workerlog.1, … go (log)"),
    Flag(name="log-level", metavar="NAME", help=_ACCEPTED),
    Flag(name="log-overwrite", metavar="BOOL", help="not needed: each run has files of its own"),
    Flag(name="job-id", metavar="ID", help="PADDLE_JOB_ID, and the beginning of the log folder's name"),
    Flag(name="run-mode", metavar="MODE", help="collective (ps and its kin are not there yet)"),
    Flag(name="backend", metavar="NAME", help="gloo: on the CPU; nccl: on GPUs (auto)"),
    Flag(name="with-gloo", metavar="0|1", help=_ACCEPTED),
    Flag(name="max-restart", kind=int, metavar="N", help="accepted; a run that fails ends"),
    Flag(name="elastic-level", kind=int, metavar="N", help=_ACCEPTED),
    Flag(name="elastic-timeout", kind=int, metavar="S", help=_ACCEPTED),
    Flag(name="elastic-server", metavar="A:PORT", help="refused: hosts are named by --ips or --master"),
    Flag(name="elastic-pre-hook", metavar="COMMAND", help=_ACCEPTED),
    Flag(name="np", metavar="N", help="as --nnodes"),
    Flag(name="scale", kind=int, metavar="N", help="refused: hosts neither come nor go"),
    Flag(name="force", metavar="BOOL", help=_ACCEPTED),
    Flag(name="sort-ip", metavar="BOOL", help=_ACCEPTED),
    Flag(name="legacy", metavar="BOOL", help=_ACCEPTED),
    Flag(name="enable-gpu-log", metavar="BOOL", help=_ACCEPTED),
    *(
        Flag(name=name, also=(f"selected-{name}",), metavar="0,1", help="refused: there are GPUs and the CPU")
        for name in ("npus", "xpus")
    ),
    *(
        Flag(name=name, metavar="VALUE", help=_ACCEPTED)
        for name in (
            "ranks",
            "enable-rank-mapping",
            "rank-mapping-path",
            "enable-auto-mapping",
            "cluster-topo-path",
            "auto-parallel-config",
            "auto-cluster-config",
            "auto-tuner-json",
        )
    ),
    Flag(name="server-num", kind=int, metavar="N", help=_SERVERS),
    Flag(name="servers", metavar="A:PORT,…", help=_SERVERS),
    Flag(name="worker-num", also=("trainer-num",), kind=int, metavar="N", help=_SERVERS),
    Flag(name="workers", also=("trainers",), metavar="A:PORT,…", help=_SERVERS),
    Flag(name="heter-worker-num", metavar="N", help=_SERVERS),
    Flag(name="heter-workers", metavar="A:PORT,…", help=_SERVERS),
    Flag(name="heter-devices", metavar="NAMES", help=_SERVERS),
    Flag(name="coordinator-num", kind=int, metavar="N", help=_SERVERS),
    Flag(name="coordinators", metavar="A:PORT,…", help=_SERVERS),
    Flag(name="http-port", kind=int, metavar="PORT", help=_SERVERS),
    Flag(name="gloo-port", kind=int, metavar="PORT", help=_SERVERS),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Defaults come from PADDLE_ variables; what nobody gives is None."""
    given = _defaults()
    for flag in FLAGS:
        flag.declare(parser, default=given.get(flag.dest))
    parser.add_argument("--insecure", action="store_true", help="ours: several hosts need no token, nor ssh")
    declare_script(parser)


def take_flags(arguments: argparse.Namespace) -> FleetrunFlags:
    """What was given."""
    return taken(arguments, FleetrunFlags)


def table_of(flags: FleetrunFlags) -> dict[str, object]:
    """What fleetrun shows at its start: the arguments that its users look for, and whatever else was given."""
    script, *arguments = flags.training_script
    shown: dict[str, object] = {
        "gpus": flags.devices,
        "ips": flags.ips or "127.0.0.1",
        "log_dir": flags.log_dir or "log",
        "server_num": flags.server_num,
        "servers": flags.servers or "",
        "training_script": script,
        "training_script_args": arguments,
        "worker_num": flags.worker_num,
        "workers": flags.workers or "",
    }
    own = {"devices", *shown}
    others = {name: value for name, value in msgspec.structs.asdict(flags).items() if name not in own}
    given = {name: value for name, value in others.items() if value is not None and value is not False}
    return dict(sorted({**shown, **given}.items()))


def user_first_port() -> int | None:
    """Return the first port of the endpoints that FLAGS_START_PORT names, or None."""
    return whole_number("FLAGS_START_PORT")


def _defaults() -> dict[str, str]:
    """Return what PADDLE_ variables give for options, by option, as `nproc_per_node`."""
    given = snapshot()
    return {option: given[name] for name, option in _VARIABLES.items() if given.get(name)}
