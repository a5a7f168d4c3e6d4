"""Ownership: which worker holds which part of parameters, gradients and optimizer state, and what a step does with it."""
