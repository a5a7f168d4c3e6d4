"""Elastic jobs: workers die, hosts leave and join, and the training continues with the workers that are there.

A `RunConfig` with an `elastic` part enters, and an exit code leaves. `launch.agent` calls `driver`, which joins the
parts: `discovery` finds the hosts and their slots, `launch.recovery.membership` decides which workers are in which
round, and `all_workers` starts them and passes messages.
"""
