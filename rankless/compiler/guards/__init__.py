"""Guards: discover the Python values that a captured program depends on, and check them before each later call."""
