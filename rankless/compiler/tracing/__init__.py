"""Observing the user's code while a job is captured: lines of operators, impure calls, symbolic sizes."""
