"""Lowering: a placed program becomes the program of one rank."""
