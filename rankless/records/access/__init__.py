"""Who may do what: clients that may not know the token of a socket, the proof for a run's store, private files."""
