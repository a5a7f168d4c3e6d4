"""The programs of a job: captured, compiled, kept for later calls, and bound to its models."""
