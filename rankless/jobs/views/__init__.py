"""The ways to run a job's calls. Each takes a definition and a world, and returns the result of one call."""
