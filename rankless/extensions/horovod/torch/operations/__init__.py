"""The operations on tensors, one file for each kind.

Enters: a call as Horovod's users write it. Leaves: a handle, or the result. `checks` rejects calls that one rank alone
finds invalid. `handles` submits the others to the engine, which compares the ranks.
"""
