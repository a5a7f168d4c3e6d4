"""The operations on tensors, one file for each kind.

Enters: a call as Horovod's users write it. Leaves: a handle, or the result. `checks` refuses what one rank can see is
wrong; `submitting` hands the rest to the negotiated operations, which compare the ranks.
"""
