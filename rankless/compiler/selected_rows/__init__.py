"""Selected rows: results as of `x[mask]`, whose numbers of rows are known only while the program runs.

With n = sum(mask), y = x[mask] has n rows. Note [counts of selected rows]: such a count is a symbol of PyTorch's
`ShapeEnv` without a number (`tracing.symbolic_sizes`). The program takes it from the first value that has it as a size.

Along an axis that divides the mask, rank r selects y_r = x_r[mask_r] among its own rows, without any exchange. It has
n_r = sum(mask_r) rows, and n = sum of n_r. The protocol of a program on one rank, in the order of the modules here:

1. `selections` creates the counts n_r with the program: all values that one mask selects are divided by the same n_r.
2. `rules` divides the operators: selecting, writing by a mask, and reading or writing rows by the numbers that a mask
   gives (`nonzero`, `torch.where`), which then count from the rank's first row.
3. `local_counts` computes n_r where it is first known. The ranks exchange their n_r, by one all-gather of numbers, once
   a mean needs n or a redistribution needs the rows of others. It checks counts that the job combines.

docs/decisions/0043-rows-selected-by-values.md has the reasons.
"""
