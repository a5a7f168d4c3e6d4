"""Releases ranks that wait in a collective for one that does not answer, from the parent of the ranks.

Enters: the processes of the ranks. Leaves: nothing; their connections, and their groups in shared memory, are ended, so
that what waits in them raises. The fork server calls it when a run ends before its ranks do.

`exception_cause` runs in the rank itself: it finds what the report of a failed script says first.
"""
