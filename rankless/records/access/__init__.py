"""Access rights: clients that may not know the token of a socket, authentication at a run's store, private files."""
