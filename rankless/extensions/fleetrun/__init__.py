"""Paddle's fleetrun: its options, its tables, and the profile of its programs."""
