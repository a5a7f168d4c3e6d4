"""Hooks on imports and library calls, with which a worker sets up and observes the script that it runs."""
