"""What the runtime passes to jobs and loaders: the mesh, the observers of the run, and the state that they share.

The runtime makes one `World` per process. Jobs and loaders receive it, and never look it up.
"""
