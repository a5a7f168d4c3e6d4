"""Supervises the workers of a run on this host: starts them, reads their records and attributes a failure to a rank.

A `HostConfig` enters; records and a `RunOutcome` leave. `launch.agent` calls it.
"""
