"""The mesh, the observers of a run and its shared state, which the runtime passes to jobs and loaders.

The runtime makes one `World` per process. Jobs and loaders receive it, and never look it up.
"""
