"""Ownership: which worker holds which part of parameters, gradients and optimizer state, and how it steps.

A job's plan enters. `state_owner` has what jobs call (gather, step, compare, save), for states that every rank has
whole. `sharded_state_owner` shards states along one axis (ZeRO), with an owner within it for the next axis (Note
[owners within owners], decision 0039). An extension may have an owner of its own (`World.owner`), and modules whose
states are elsewhere (`modules_with_states_elsewhere`). The shards of a host's workers may lie in one memory
(`adjacent_shards_in_shared_memory`, decision 0035), or in the memory of the host (`host_device_copies`).
`unread_tensor` stands for a tensor of a checkpoint that is read when something needs it (decision 0031).
"""
