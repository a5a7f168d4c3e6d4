"""Compare the recordings of several runs and decide whether they are the same training. Imports no torch.

Recordings enter, a verdict leaves. `cli.verify` calls this folder. Workers write the recordings in `verify.recording`.
"""
