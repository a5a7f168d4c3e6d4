"""Compare the recordings of several runs and decide whether they are the same training. Imports no torch.

Recordings enter, a verdict leaves. `cli.verify` calls this folder. Workers write the recordings in `verify.recording`.

`runs` makes the runs, which share one import of torch, and `run_and_decide` chooses which are needed.
`differences_beyond_tolerance` compares the recordings. `noise_floor` says how far two correct runs may lie apart, and
`differences_beyond_tolerance` where that is too far to find a fault. `read_and_combine_recordings` combines the ranks
of a script that divides its own data; `causes` names why they differ. If the runs of a job differ,
`first_differing_value` compares the values of one call, which `recording.value_probes` records.
"""
