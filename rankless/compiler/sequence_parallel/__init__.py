"""Sequence parallelism: workers divide the positions of each sample between them. Two methods use it.

Along the axis `sequence` every value is divided by positions, from the job's arguments on (`jobs.arguments`), and
only attention needs those of others. With q_r, k_r and v_r on rank r, the result is softmax(q_r k^T) v for all keys k:

- All-to-all: from (positions / R, heads) to (positions, heads / R), attention of these heads, and back (Jacobs et al.,
  "DeepSpeed Ulysses", 2023).
- Ring: the blocks (k_s, v_s) travel around the ring of ranks. The results o_s for single blocks are merged by their
  sums of exponentials, l_s: l = log(sum of exp(l_s)), o = sum of exp(l_s - l) o_s (Liu et al., "Ring Attention with
  Blockwise Transformers", 2023).

`attention` has both as rules and lowerings, `attention_kernels` the blocks.

Between two layers that the axis `tensor` divides, the sum of terms is divided by positions, instead of being whole on
every worker (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022). An all-reduce
becomes a reduce-scatter before, and an all-gather after, what lies between them: `rows_between_layers`.
"""
