"""Which workers a run continues with after some of them, or their hosts, are lost: the agent's side.

`survivors` decides it for a run whose number of workers is fixed. `membership` decides which workers are in which round
of a job that workers and hosts join and leave, and gives them ranks; it excludes hosts where workers keep failing.
`runtime.worker_recovery` is the worker's side.
"""
