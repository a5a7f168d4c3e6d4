"""The options of horovodrun's command line."""

import msgspec


class HorovodrunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The options given on the command line or in its `--config-file`; None if an option is not given."""

    num_proc: int | None = None
    check_build: bool = False
    disable_cache: bool = False
    start_timeout: int | None = None
    network_interfaces: tuple[str, ...] = ()
    output_filename: str | None = None
    verbose: bool = False
    config_file: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None

    fusion_threshold_mb: int | None = None
    cycle_time_ms: float | None = None
    cache_capacity: int | None = None
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    torus_allreduce: bool | None = None

    autotune: bool | None = None
    autotune_log_file: str | None = None
    autotune_warmup_samples: int | None = None
    autotune_steps_per_sample: int | None = None
    autotune_bayes_opt_max_samples: int | None = None
    autotune_gaussian_process_noise: float | None = None

    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots_per_host: int | None = None
    elastic_timeout: int | None = None
    reset_limit: int | None = None
    blacklist_cooldown_range: tuple[int, int] | None = None

    timeline_filename: str | None = None
    timeline_mark_cycles: bool | None = None

    no_stall_check: bool | None = None
    stall_check_warning_time_seconds: int | None = None
    stall_check_shutdown_time_seconds: int | None = None

    mpi_threads_disable: bool | None = None
    mpi_args: str | None = None
    mpi_launch_flag: tuple[str, ...] = ()
    """`env NAME=VALUE …` for the workers. Horovod itself does not have it, but tutorials use it."""
    tcp: bool = False
    binding_args: str | None = None
    num_nccl_streams: int | None = None
    thread_affinity: int | None = None
    gloo_timeout_seconds: int | None = None

    log_level: str | None = None
    log_with_timestamp: bool | None = None
    prefix_output_with_timestamp: bool = False

    hosts: str | None = None
    hostfile: str | None = None
    host_discovery_script: str | None = None

    gloo: bool = False
    mpi: bool = False
    jsrun: bool = False

    command: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave while the job runs."""
        return self.host_discovery_script is not None or self.min_num_proc is not None
