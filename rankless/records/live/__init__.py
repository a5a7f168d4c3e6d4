"""Facts about a run in progress, in memory that processes share: one process writes each, and any number reads it."""
