"""The captured program: its graph in logical shapes, its custom operators, and the kernels that ranks run locally."""
