"""The options of torchrun's command line."""

import msgspec


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
