"""The operating system's side of a group: memory that its ranks share, sleep until it changes, and their lives.

Enters: the identities of the ranks' processes, and a store through which they exchange them. Leaves: mapped memory, the
offsets of its words, and who has ended. `signals` and `slots`, one folder up, use them.
"""
