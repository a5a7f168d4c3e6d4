"""Observe the user's code during capture: source lines of operators, impure calls, symbolic sizes."""
