"""The terminal: the progress of a job, the table of `rankless plan` and the results of `rankless doctor`.

The input is records and nothing else; the output is lines on a terminal or in a file. `rankless.cli` and `rankless.api`
call it. It needs no torch.
"""
