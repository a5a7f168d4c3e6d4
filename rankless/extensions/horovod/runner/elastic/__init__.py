"""Host discovery and notifications of elastic jobs, for tools that derive from Horovod's classes.

`rankless.extensions.horovodrun.elastic` runs elastic jobs, and does not use these.
"""
