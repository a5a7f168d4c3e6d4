"""The APIs of other systems, for scripts that were written for them.

Enters: a script's calls, under the other system's names. Leaves: the same results, from Rankless. No other package of
Rankless calls it. Scripts import it under the other system's name (see `runtime.hooks.horovod_imports`).
"""
