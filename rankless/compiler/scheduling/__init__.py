"""Scheduling: when collectives start, and when the program waits for them."""
