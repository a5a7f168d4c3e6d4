"""Ownership: which worker holds which part of parameters, gradients and optimizer state, and how it steps."""
