"""Elastic jobs: workers die, hosts come and go, and the training goes on with who is there.

Enters: a `RunConfig` with an `elastic` part. Leaves: an exit code. `launch.agent` calls `driver`. `discovery` says
which
hosts there are, `blacklist` which of them get no new workers for now, `roll` decides who is in which round (pure: it is
asked and answers), `seating` who has which rank, `crew` starts workers and carries words, `driver` joins all that.
"""
