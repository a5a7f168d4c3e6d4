"""How a worker continues without others that were killed, in a run whose servers have the tables (decision 0049)."""
