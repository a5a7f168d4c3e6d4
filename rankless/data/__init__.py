"""From a data set to whole batches: a one-process DataLoader's, in its order, of which each rank holds its rows.

Enters: a data set and DataLoader's options. Leaves: batches of logical tensors. `order` decides which samples come,
`source` reads them (by `requests`, as `streams`, or on the `first_rank`), `batches` makes them logical once all ranks
agree. Called by `rankless.api`; jobs learn from `passes` where a loop over a loader stands. `shard_check` asks of
any loader, torch's above all, whether the ranks' `shards` divide the data.
"""
