"""horovodrun's `--config-file`: options by section, in YAML. The command line overrides it."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rankless.errors import ConfigError
from rankless.extensions.horovodrun.parser import HorovodrunFlags

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "params": {
        name: name
        for name in (
            *("fusion_threshold_mb", "cycle_time_ms", "cache_capacity"),
            *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        )
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune_log_file",
        "warmup_samples": "autotune_warmup_samples",
        "steps_per_sample": "autotune_steps_per_sample",
        "bayes_opt_max_samples": "autotune_bayes_opt_max_samples",
        "gaussian_process_noise": "autotune_gaussian_process_noise",
    },
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "no_stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        name: name for name in ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds")
    },
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}
"""The option for each key of each section."""
_CONTROLLERS = ("gloo", "mpi")


def read_config(path: str) -> dict[str, Any]:
    """Return the file's content by section. Raises `ConfigError` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            found = msgspec.yaml.decode(file.read())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            expected="a file of options in YAML, with sections as `params:` and `timeline:`",
            found=f"{path}: {getattr(error, 'strerror', None) or error}",
            fix="check the path given to --config-file, and the file",
        ) from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(found.get(name) or {}, dict) for name in SECTIONS):
        raise ConfigError(
            expected=f"sections in {path}, each with options below it",
            found=type(found).__name__ if not isinstance(found, dict) else ", ".join(map(str, found)),
            fix="as in `params:`, and below it, indented, `fusion_threshold_mb: 32`",
        )
    return found


def complete_flags(flags: HorovodrunFlags, config: Mapping[str, Any], *, path: str) -> HorovodrunFlags:
    """Return the flags, with those that the command line omits from the file.

    Raises `ConfigError` for values of the wrong type.
    """
    values = msgspec.to_builtins(flags)
    values |= {name: value for name, value in _options(config) if values[name] is None}
    controller = config.get("controller")
    if controller is not None and not (flags.gloo or flags.mpi or flags.jsrun):
        name = str(controller).lower()
        if name not in _CONTROLLERS:
            raise ConfigError(expected=f"controller: gloo or mpi in {path}", found=controller, fix="omit it")
        values[name] = True
    try:
        return msgspec.convert(values, HorovodrunFlags, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            expected=f"options of the right types in {path}", found=str(error), fix="correct it"
        ) from None


def unknown_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unknown keys of the file, each with the nearest known name."""
    known = ["controller", *SECTIONS]
    for section, below in config.items():
        if section not in known:
            yield f"{section}{_nearest(str(section), known)}"
        elif section != "controller":
            for name in (below or {}).keys() - SECTIONS[section].keys():
                yield f"{section}.{name}{_nearest(str(name), list(SECTIONS[section]))}"


def _options(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, options in SECTIONS.items():
        for name, value in (config.get(section) or {}).items():
            if name in options and value is not None:
                # The file enables the stall check, the option disables it.
                yield options[name], not value if (section, name) == ("stall_check", "enabled") else value


def _nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
