"""`horovod.runner.mpi_run`: can be imported. There is no MPI: the agent of `horovodrun` starts the processes."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup("horovod.runner.mpi_run", "`rankless horovodrun`, or horovod.run")
