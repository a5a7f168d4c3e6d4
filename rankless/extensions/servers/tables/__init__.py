"""Tables: ids to rows, and what optimizers do to rows. Numbers come in as NumPy arrays; nothing here knows PyTorch.

`table` is the whole: `id_map` finds rows, `rows` creates and removes them, `row_optimizers` steps them by the functions
in `updates`. numba compiles what works on single ids.
"""
