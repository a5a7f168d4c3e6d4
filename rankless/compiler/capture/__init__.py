"""Capture: a job's function and its modules become one graph, forward and backward, in logical shapes."""
