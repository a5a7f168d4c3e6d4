"""Benchmarks of Rankless and a peer, measured alternately. `python -m bench [NAME] [--json FILE]`."""
