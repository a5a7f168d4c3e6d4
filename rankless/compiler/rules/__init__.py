"""Sharding rules: which placements of an operator's inputs and outputs need no communication, one family per file.

Input: an `OperatorCall` (an operator in the logical program, and the present placements of its inputs). Output: its
`Strategy` objects. Caller: `sharding.sharding_propagation`. Operators without a rule run replicated.
"""
