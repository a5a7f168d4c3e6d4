"""`horovod.runner.gloo_run`: can be imported. The agent of `rankless horovodrun` starts the processes."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup("horovod.runner.gloo_run", "`rankless horovodrun`, or horovod.run")
