"""Models that are built without memory for their values.

A script builds a model inside `rankless.deferred()`. Operators on tensors become entries of a recording, and the
random generators advance as they would. The first call of a job computes the values again, tensor by tensor:
`recording` has the operators, and `building.materialize` runs them. `save` and `load` compute values too. Decision
0026 has the reasons.
"""
