"""Record a run inside its workers: results of jobs, parameters, and every value of one call.

Job calls and optimizer steps enter through the protocols in `context.world`. Files of typed records leave.
`run_recorder` records jobs. `recorder_of_scripts_without_jobs` records a plain script, or one of another framework,
through PyTorch's hooks.
"""
