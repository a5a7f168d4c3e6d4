"""Several hosts of one job: how they are reached, meet, are compared, and what probes of a missing one say.

Enters: a plan with its hosts and a token. Leaves: a job whose hosts are all there, or an error that names who is
missing or differs. `launch.assembly` calls it; its messages travel by `launch.control`.
"""
