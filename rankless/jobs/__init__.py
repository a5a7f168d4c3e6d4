"""Jobs: functions on whole batches that Rankless runs on one device or on many.

A function, its models and its optimizers enter; a callable that takes and returns whole values leaves. `rankless.api`
calls it.
"""
