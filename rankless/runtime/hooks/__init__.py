"""Hooks on imports and library calls, by which a worker observes the script that it runs."""
