"""Batches that one worker reads for others.

Rank 0 reads for all (`batches_from_first_rank`), or workers on the CPU for heterogeneous ones
(`batches_from_cpu_workers`). `BatchSource` passes in what a worker has read, and gets batches for every worker. A
`ReaderTensor` stands for a tensor whose values only the workers on the CPU have.
"""
