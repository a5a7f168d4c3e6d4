"""Collectives across hosts: ranks reduce in shared memory within each host, and the first ranks then between hosts.

Enters: a `torch.distributed.Store` that the ranks share. Leaves: what a process group of the backend "hierarchical"
runs its collectives in, or why the ranks cannot have one. `process_group` makes it known to torch. Decision 0033
has the reasons.

The layers, from below: `ranks_of_hosts` says who is on which host. `gloo_exchange` moves bytes between ranks of several
hosts. `host_waits` limits and ends waits, and tells all ranks why the group ended. `leader_exchange` compares the calls
of all hosts in the first exchange of each, and has the algorithms between hosts, `host_reductions` and `host_movement`
the whole collectives, also for calls without values. `hosts_group` makes and holds everything, and
`process_group` has torch's signatures.
"""
