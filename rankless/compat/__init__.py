"""APIs of other systems, for scripts that were written for them.

Enters: a script's calls, in that system's words. Leaves: the same results, from Rankless. Nobody of Rankless
calls it:
scripts do, under the other system's import name (`runtime.hooks.import_aliases`).
"""
