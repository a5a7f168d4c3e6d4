"""Benchmarks: ours beside a peer's, by turns. `python -m bench [NAME] [--json FILE]`."""
