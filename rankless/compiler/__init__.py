"""Compile a job: capture it in logical shapes, propagate shardings over a mesh, lower to each rank's program, run it.

Input: a function, its modules, example inputs and a mesh. Output: a `LocalProgram` to call. Caller: `rankless.jobs`.
"""
