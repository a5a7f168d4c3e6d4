"""Named operations that each rank may submit in its own order, and that all ranks execute in one order.

Enters: operation requests, at an `operation_scheduler`. Leaves: their results, by handle. `hvd.init` makes one
scheduler, through `extensions.horovod.context`. The scheduler submits requests with a `coordinator_client`, over
`connections`, to the `coordinator` of rank 0. The coordinator decides what is executed next, and finds requests that do
not match. `execution` executes a batch on the `backends`, which move the data.
"""
