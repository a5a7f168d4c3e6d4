"""Sharding propagation: a placement per value, a strategy per operator, and the redistributions between them."""
