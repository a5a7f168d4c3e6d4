"""Capture: a job's function and its modules become one graph, forward and backward, in logical shapes.

`capture` runs the function once and records its operators. `trace_errors`, `side_effects` and `refused_training_calls`
refuse what a program cannot do, with the line of the script. A value that the job's Python reads is known to the trace
(`value_reads`) and a constant for operators (`tensors_kept_between_calls`). `lowering.value_check` compares it at each
run. `tracing.refused_tensor_functions` follows `.data` (decision 0023). `global_modes` makes PyTorch's switches part of
the cache key.
"""
