"""A job as a program: captured in logical shapes, placed on a mesh, lowered to each rank's part, run.

Enters: a function, its modules, example inputs, a mesh. Leaves: a `LocalProgram` to call. Called by `views`.
"""
