"""The logical view: an ordinary PyTorch loop whose batches are divided between the ranks.

Every rank runs the whole script. A batch is a `tensor.DividedTensor`: the script sees the whole shape, and the rank
holds some of its rows. A plain tensor is whole, and equal on all ranks. Each PyTorch function that takes a logical
tensor is a program of one call: it is traced on the whole shapes, forward and backward, and the rules of the compiler
lower it for the rank's rows. A signature is lowered once.

Note [placements of gradients]: let a logical value be v = Σ_r E_r(v_r), where rank r holds v_r. For rows, E_r puts them
in their place among zeros. For a partial sum, E_r is the identity. A whole value is v = v_r on each rank. If the rank's
program computes y_r = f_r(x_0, …, x_n), then by the chain rule the gradient of a loss L lies as follows:

    value              its gradient
    rows (Shard)       the same rows:               dL/dv_r
    partial sum        whole on each rank:          dL/dv_r = dL/dv, because v = Σ_r v_r
    whole              partial sum over the ranks:  dL/dv = Σ_r dL/dv_r, because each rank uses its own copy

Each redistribution is linear, and its gradient is redistributed by the transpose: an all-gather by a reduce-scatter, an
all-reduce by an all-reduce, a choice of rows by padding with zeros. What ranks compute alike from whole values has
gradients that are partial sums too, since a gradient is linear in the gradients of the results. So parameters, buffers
and whatever a script computes from them stay plain tensors under PyTorch's own autograd, and one sum over the ranks at
the end makes their gradients whole. A backward pass from a whole value begins with its gradient on rank 0 and zeros
elsewhere.
"""
