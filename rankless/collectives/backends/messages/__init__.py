"""Messages from one rank of a shared memory group to another: send, recv and recv_anysource.

Enters: flat bytes, the other rank and a tag. Leaves: the work of the message. `process_group` calls `PointToPoint`.
"""
