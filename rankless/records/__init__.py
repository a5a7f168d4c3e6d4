"""Facts that a run writes down: typed, the only thing that observers read.

Enters: what happens in a worker, the warm parent or the agent. Leaves: frozen structs, encoded with
msgspec. Called by every layer above.
"""
