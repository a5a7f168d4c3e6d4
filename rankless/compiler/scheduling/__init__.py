"""Scheduling: when collectives start, and when the program waits for them.

`gradient_buckets` puts the reductions of gradients into buckets, starts each as early as possible, and waits as late as
possible. `gradient_buckets_and_state_storage` gives each gradient its strides, in memory that the workers of a host
share, so that the sum copies nothing. It also says which states a worker holds sharded. `parameter_gathers` gathers
those before their use, and again for the backward pass. Those in one memory of all workers are read there, and results
are copied out.
"""
