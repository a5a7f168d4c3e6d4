"""Where values lie on the workers: the mesh, and the placement of a value on it."""
