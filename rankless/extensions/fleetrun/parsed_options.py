"""The options of fleetrun's command line."""

import msgspec


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
