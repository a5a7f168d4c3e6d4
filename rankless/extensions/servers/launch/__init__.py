"""The parameter servers of a run: their addresses, and their processes from the first to the last moment of the run.

`prepare_run` asks for addresses and the agent for processes. Servers start before the workers and end after them.
"""
