"""Supervising the workers of a run on this host: starting them, reading their records, and deciding why the run ended.

A `HostConfig` enters; records and an exit code leave. `launch.agent` calls it.
"""
