"""Tensor parallelism: which dims of which parameters a program can divide, and which of them it does."""
