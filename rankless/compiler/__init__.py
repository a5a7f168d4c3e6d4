"""Compile a job: capture it in logical shapes, propagate shardings over a mesh, lower to each rank's program, run it.

Input: a function, its modules, example inputs and a mesh. Output: a `LocalProgram` to call. Caller: `rankless.jobs`.

The folders in the order of a compilation:

- `capture`, with `tracing`, makes one graph of the function, forward and backward, in logical shapes. What cannot be
  one program, or would be lost or stale in one, is refused with its line. `guards` finds the Python values that were
  read.
- `accumulation` finds what splitting the batch does to each value, and what a loss divides by (gradient accumulation).
- `sharding` gives each value a placement along each axis, and each operator a strategy from `rule_table`, which has
  those of `rules`. `probing` tries an operator without a rule.
- `lowering` makes each rank's program from it: redistributions, sums and counts instead of means, values that the
  backward pass computes again, phases for experts on single ranks.
- `scheduling` orders communication: buckets of gradients, gathers of sharded parameters. On a mesh with the axis
  `pipeline`, the folder `pipeline_parallel` does this instead.
- `local_program` writes the program as Python. `ir` has the graph, Rankless's own operators, and their kernels.

Each method has one place, whose head gives its equation: `tensor_parallel`, `sequence_parallel`, `expert_parallel`,
`pipeline_parallel`, and `selected_rows` for `x[mask]`.

Sizes that have varied are symbols in every stage (`tracing.symbolic_sizes`). Decisions that depend on them become
guards, which all ranks share.
"""
