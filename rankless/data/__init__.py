"""The loader: from a data set to batches of logical tensors.

A data set and the options of `DataLoader` enter. Batches in the order of a one-process `DataLoader` leave: every rank
knows the whole batch and holds its own rows. `rankless.api` makes the loader.

`sample_order` decides which samples come. `batch_source` reads them: through `batch_indices`, from a stream, or on
some workers for others. Rank 0 then reads for all (`batches_from_first_rank`), or workers on the CPU for heterogeneous
ones (`batches_from_cpu_ranks`, `tensors_on_cpu_ranks`). `batch_agreement` checks that all ranks agree and makes tensors
logical. If a `collate_fn` does not work row by row, every rank reads whole batches. `disjoint_shards_check` checks for
any loader, also one of torch, that the ranks divide the data (`samples_of_rank`).
"""
