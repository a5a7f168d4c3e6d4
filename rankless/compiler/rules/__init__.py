"""Which placements of an operator's inputs give which of its outputs without communication, family by family.

Enters: a `Call` (an operator in the logical program, and how its inputs lie now). Leaves: the `Strategy`s open to it.
Called by `compiler.sharding.sharding_propagation`. An operator that no rule covers is gathered and computed whole.
"""
