"""What is to be done: frozen data, no torch.

Enters: what the command line or the environment says. Leaves: a `RunPlan` for the agent, a `WorkerPlan` for
each worker. Called by `cli`, `launch` and `runtime`.
"""
