"""The typed records of a run, the only thing that observers read.

Enters: events in a worker, a fork server or the agent. Leaves: frozen structs, encoded with msgspec. Every layer above
uses it.
"""
