"""What the runtime gives to jobs and loaders: the mesh, the observers of the run, and state that a process shares.

The runtime makes one `World` per process. Jobs and loaders receive it, and never look it up.
"""
