"""Other launchers' command lines, and the profile of each: how its programs expect to be started.

A user's torchrun, fleetrun or horovodrun command line enters; a `RunConfig` that carries a profile leaves. The commands
in `cli` call these packages. `launch` sees only the interface of a profile.
"""
