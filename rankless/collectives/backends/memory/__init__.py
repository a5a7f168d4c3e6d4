"""The operating system's side of a group: memory that its ranks share, and their lives.

Enters: the identities of the ranks' processes, and a store through which they exchange them. Leaves: mapped memory,
and who has ended. `signals` and `slots`, one folder up, use them.
"""
