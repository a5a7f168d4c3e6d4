"""Running a function on several processes, as `horovod.run` does."""
