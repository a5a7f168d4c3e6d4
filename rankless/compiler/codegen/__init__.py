"""Code generation: a scheduled program becomes straight-line Python."""
