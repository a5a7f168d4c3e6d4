"""Lowering: convert a sharded program into the program of one rank."""
