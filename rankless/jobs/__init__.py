"""Jobs: functions on whole batches that run on one device or on many.

A function, its models and its optimizers enter. A callable that takes and returns whole values leaves. `rankless.api`
makes and calls it. A job runs in one of the `views`: plain on one device, consistent as one program on a mesh, with
`capture=False` on the whole batch on every rank, or mirrored once per device. An extension may add a view of its own.

`job` flattens the arguments (`arguments`). `call_agreement` compares the call with those of other ranks, and
`model_sync_between_ranks` the models. `programs.program_cache` finds or compiles the program. `optimizer_step`
accumulates (`gradient_accumulation`), checks, clips, and lets the script's optimizers step.
"""
