"""Code generation: convert a scheduled program into straight-line Python."""
