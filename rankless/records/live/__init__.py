"""Facts about a run that goes on, in memory that processes share: one process writes each, and any number reads it."""
