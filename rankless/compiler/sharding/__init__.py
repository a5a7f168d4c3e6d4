"""Sharding propagation: a placement for each value, a strategy for each operator, and the redistributions between."""
