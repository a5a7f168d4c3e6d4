"""The code that runs inside the processes of a job. The only package that makes process groups.

Enters: a `HostConfig` (for the fork server) or a `WorkerConfig` (for a worker). Leaves: records, and for the API the
one `ProcessContext` of the process. Called by `launch`, which starts the processes, and by `rankless.api`.
"""
