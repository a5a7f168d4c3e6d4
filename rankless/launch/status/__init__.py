"""The status of runs. An agent publishes where its workers and servers are; `rankless status` finds and reads that.

`launch.live_run_publisher` is the agent's side. `run_lookup` finds runs, `read_counters` reads their shared memory
and `/proc`, and `build_status` makes a `RunStatus` of two readings. Reading sends no signal and stops no process.
"""
