"""How a worker continues without others that were killed (decision 0049)."""
