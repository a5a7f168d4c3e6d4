"""`horovod.runner.elastic.driver`: can be imported. `rankless.extensions.horovodrun.elastic` runs elastic jobs."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup(
    "horovod.runner.elastic.driver",
    "`rankless horovodrun --host-discovery-script`, which runs rankless.extensions.horovodrun.elastic.driver",
)
