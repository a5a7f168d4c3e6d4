"""Launches a run: starts the processes of a `RunConfig`, supervises them to the end, and reports the result.

A `RunConfig` enters. Log files, records for an observer and an exit code leave. `cli` calls `agent.run`. Inside, each
part imports only those after it: `agent`, `recovery`, `supervisor`, `watchdog`, `multi_host_setup`, `prepare_run`,
`doctor`, `rendezvous`, and the small modules `launcher_profile`, `ports`, `signal_reader` and `worker_output`.
"""
