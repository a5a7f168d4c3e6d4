"""The configuration of a run: frozen data, without torch.

The options of a command line and the environment enter. A `RunConfig` for the agent and a `WorkerConfig` for each
worker leave. `cli`, `launch` and `runtime` call it.
"""
