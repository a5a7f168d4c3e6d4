"""The captured program: its graph in logical shapes, the custom operators in it, and the kernels that run locally."""
