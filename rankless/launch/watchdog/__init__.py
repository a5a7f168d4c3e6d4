"""Seeing that a job stands still: which ranks wait where, and which rank does not come.

Enters: what the kernel tells of workers (`vitals`), what they count (`pace`), their stacks when asked (`stacks`, read
by `places`). Leaves: `Where` records of this host's ranks (`lookout`), and on host 0 what `jury` finds in those of all,
in the words of `wording`. `hang_watch` turns the wheel, whenever `launch.supervisor.supervisor` calls it. Linux only:
elsewhere nothing
is watched.
"""
