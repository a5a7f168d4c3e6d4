"""What tables and servers do in the steps of a script.

`participant` hears the events that all ranks handle together (`context.extension_participants`), `job_tables` those of
one job; `shared_tables` has the tables of the process, `worker_tables` those of one of several workers. In the modes
`async`, `bounded` and `geo`, each worker trains on batches of its own: `independent_view` is the view of its jobs, and
`independent_workers` says where workers meet, and `own_steps` and `geo_training` make the steps.
"""

PARTICIPANT = "rankless.extensions.servers.training.participant"
"""The module of the participant, by which tables name it. It imports jobs, and tables must not."""
