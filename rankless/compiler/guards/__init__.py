"""Python values that a captured program depends on: finding them, and checking them before each later call."""
