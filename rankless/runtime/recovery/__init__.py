"""How a worker goes on without others that were killed, in a run with parameter servers (decision 0049)."""
