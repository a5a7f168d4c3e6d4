"""Inside the processes of a run: told, joined, run, left. The only maker of process groups.

Enters: a `HostConfig` (the workers' parent) or a `WorkerConfig` (a worker). Leaves: records, and for the facade
the one joined `Runtime` of the process. Called by `launch`, as new processes, and by `rankless.api`.
"""
