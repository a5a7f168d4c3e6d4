"""Observe the user's code during capture: source lines of operators, impure calls, symbolic sizes.

`activation_checkpoints` runs a checkpointed function once. `recomputed_weights` finds weights that a hook computes
before each forward pass, which are no state of the job. `script_generators` lets operators with `generator=` draw from
the script's generator.
"""
