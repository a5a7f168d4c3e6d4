"""From a plan to living processes, and to a verdict on how they ended.

Enters: a `RunConfig`. Leaves: log files, records for an observer, an exit code. Called by `cli`.
"""
