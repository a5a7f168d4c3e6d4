"""What a user watches while a job runs.

Enters: records, and nothing else. Leaves: lines on a terminal or in a file. Called by `cli` and `script`;
needs no torch.
"""
