"""How the agents of several hosts find each other, check that they agree, and exchange messages while the job runs.

A `RunConfig` with its hosts and a token enters. A job whose hosts have all arrived leaves, or an error that names each
missing or different host. `launch.multi_host_setup` calls it. No training data travels here.
"""
