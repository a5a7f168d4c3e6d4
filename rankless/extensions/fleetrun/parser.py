"""The options of Paddle's fleetrun, and of `python -m paddle.distributed.launch`, word for word."""

import argparse

import msgspec

from rankless.cli.launcher_option_spellings import Flag, declare_script, parse_flags
from rankless.config.environment import snapshot, whole_number


class FleetrunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The options given on the command line or by PADDLE_ variables; None if an option is not given."""

    devices: str | None = None
    nproc_per_node: int | None = None
    ips: str | None = None
    nnodes: str | None = None
    master: str | None = None
    rank: int | None = None
    host: str | None = None
    start_port: int | None = None
    log_dir: str | None = None
    log_level: str | None = None
    log_overwrite: str | None = None
    job_id: str | None = None
    run_mode: str | None = None
    backend: str | None = None
    with_gloo: str | None = None
    max_restart: int | None = None
    elastic_level: int | None = None
    elastic_timeout: int | None = None
    elastic_server: str | None = None
    elastic_pre_hook: str | None = None
    np: str | None = None
    scale: int | None = None
    force: str | None = None
    sort_ip: str | None = None
    legacy: str | None = None
    enable_gpu_log: str | None = None
    npus: str | None = None
    xpus: str | None = None
    ranks: str | None = None
    enable_rank_mapping: str | None = None
    rank_mapping_path: str | None = None
    enable_auto_mapping: str | None = None
    cluster_topo_path: str | None = None
    auto_parallel_config: str | None = None
    auto_cluster_config: str | None = None
    auto_tuner_json: str | None = None
    server_num: int | None = None
    servers: str | None = None
    worker_num: int | None = None
    workers: str | None = None
    heter_worker_num: str | None = None
    heter_workers: str | None = None
    heter_devices: str | None = None
    coordinator_num: int | None = None
    coordinators: str | None = None
    http_port: int | None = None
    gloo_port: int | None = None
    insecure: bool = False
    """Rankless only: several hosts need no token."""
    training_script: tuple[str, ...] = ()
    """The script and its own arguments."""


_COORDINATORS = "Rejected: coordinators are not supported."
_ACCEPTED = "Accepted for compatibility and ignored."

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
        name="devices",
        also=("gpus", "selected-gpus"),
        metavar="0,1",
        help="GPUs to use, with one process per GPU. Default: all visible GPUs.",
    ),
    Flag(
        name="nproc-per-node",
        kind=int,
        metavar="N",
        help="Processes on each host. Fewer processes than GPUs share the GPUs; without GPUs they run on the CPU. "
        "Default: one per GPU, or 1 on the CPU.",
    ),
    Flag(name="ips", metavar="A,B", help="Addresses of the hosts; run the same command on each. Default: 127.0.0.1."),
    Flag(name="nnodes", metavar="N", help="Number of hosts, with --master instead of --ips. Default: 1."),
    Flag(
        name="master",
        metavar="A:PORT",
        help="Address and port of the first host; with --ips, the port of the rendezvous. Default port: 9988.",
    ),
    Flag(
        name="rank",
        kind=int,
        metavar="K",
        help="Number of this host; host 0 is the master. Default: in order of arrival.",
    ),
    Flag(name="host", metavar="A", help="Accepted for compatibility; Rankless finds this host by its addresses."),
    Flag(
        name="start-port",
        kind=int,
        metavar="PORT",
        help="First port of PADDLE_TRAINER_ENDPOINTS. Default: a free port, or 6070 on several hosts.",
    ),
    Flag(name="log-dir", metavar="DIR", help="Folder for the logs workerlog.0, workerlog.1, …. Default: log."),
    Flag(name="log-level", metavar="NAME", help=_ACCEPTED),
    Flag(name="log-overwrite", metavar="BOOL", help="Accepted for compatibility; every run has its own log files."),
    Flag(name="job-id", metavar="ID", help="Value of PADDLE_JOB_ID, and prefix of the log folder's name."),
    Flag(
        name="run-mode",
        metavar="MODE",
        help="collective, or ps for parameter servers. Default: ps with options for them, else collective.",
    ),
    Flag(name="backend", metavar="NAME", help="gloo for the CPU, nccl for GPUs, or auto. Default: auto."),
    Flag(name="with-gloo", metavar="0|1", help=_ACCEPTED),
    Flag(name="max-restart", kind=int, metavar="N", help="Accepted for compatibility; the first failure ends the job."),
    Flag(name="elastic-level", kind=int, metavar="N", help=_ACCEPTED),
    Flag(name="elastic-timeout", kind=int, metavar="S", help=_ACCEPTED),
    Flag(name="elastic-server", metavar="A:PORT", help="Rejected: name the hosts with --ips or --master."),
    Flag(name="elastic-pre-hook", metavar="COMMAND", help=_ACCEPTED),
    Flag(name="np", metavar="N", help="Same as --nnodes."),
    Flag(name="scale", kind=int, metavar="N", help="Rejected: the set of hosts is fixed."),
    Flag(name="force", metavar="BOOL", help=_ACCEPTED),
    Flag(name="sort-ip", metavar="BOOL", help=_ACCEPTED),
    Flag(name="legacy", metavar="BOOL", help=_ACCEPTED),
    Flag(name="enable-gpu-log", metavar="BOOL", help=_ACCEPTED),
    *(
        Flag(name=name, also=(f"selected-{name}",), metavar="0,1", help="Rejected: Rankless supports GPUs and the CPU.")
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
    Flag(
        name="server-num", kind=int, metavar="N", help="Number of parameter servers, of each host if there are several."
    ),
    Flag(
        name="servers",
        metavar="A:PORT,…",
        help="Addresses of the parameter servers instead of --server_num; run the same command on each of their hosts.",
    ),
    Flag(
        name="worker-num",
        also=("trainer-num",),
        kind=int,
        metavar="N",
        help="Number of workers beside parameter servers, of each host if there are several. Each takes a GPU, which "
        "others share if there are too few.",
    ),
    Flag(
        name="workers",
        also=("trainers",),
        metavar="A:PORT,…",
        help="Addresses of the workers instead of --worker_num. A repeated address is another worker. Default port: a "
        "free one.",
    ),
    Flag(
        name="heter-worker-num",
        metavar="N",
        help="Number of heterogeneous workers besides, on one host. They compute the dense part of models, which the "
        "script marks, and take the GPUs. The others look rows up on the CPU.",
    ),
    Flag(
        name="heter-workers",
        metavar="A:PORT,…",
        help="Addresses of the heterogeneous workers instead of --heter_worker_num, all of this host.",
    ),
    Flag(
        name="heter-devices",
        metavar="gpu|cpu",
        help="Devices of the heterogeneous workers. Default: GPUs if there are any.",
    ),
    Flag(name="coordinator-num", kind=int, metavar="N", help=_COORDINATORS),
    Flag(name="coordinators", metavar="A:PORT,…", help=_COORDINATORS),
    Flag(
        name="http-port",
        kind=int,
        metavar="PORT",
        help="Port of PADDLE_GLOO_HTTP_ENDPOINT, at which Rankless serves nothing. Default: a free one.",
    ),
    Flag(name="gloo-port", kind=int, metavar="PORT", help=_ACCEPTED),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Defaults come from PADDLE_ variables; options that are not given are None."""
    given = _defaults()
    for flag in FLAGS:
        flag.declare(parser, default=given.get(flag.dest))
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="Rankless only: several hosts join without a token or ssh; every program that reaches the port may join.",
    )
    declare_script(parser)


def read_flags(arguments: argparse.Namespace) -> FleetrunFlags:
    """Return the parsed options."""
    return parse_flags(arguments, FleetrunFlags)


def list_arguments(flags: FleetrunFlags) -> dict[str, object]:
    """Return the arguments that fleetrun shows at its start: those that its users expect, and others that are given."""
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
