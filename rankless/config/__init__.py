"""What is to be done: frozen data, no torch.

Enters: what the command line or the environment says. Leaves: a `RunConfig` for the agent, a `WorkerConfig` for
each worker. Called by `cli`, `launch` and `runtime`.
"""
