"""How a worker continues without others that were killed, in a run with parameter servers (decision 0049)."""
