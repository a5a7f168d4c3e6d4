"""Comparing the recordings of two runs, and deciding whether they are the same training. It imports no torch.

Recordings enter; a verdict leaves. `cli.verify` calls it. The workers write the recordings in `verify.recording`.
"""
