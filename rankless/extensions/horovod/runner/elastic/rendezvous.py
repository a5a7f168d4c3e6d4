"""`horovod.runner.elastic.rendezvous`: can be imported. The agents of an elastic job tell its workers their ranks."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup(
    "horovod.runner.elastic.rendezvous",
    "`rankless horovodrun --host-discovery-script`, whose agents tell the workers their ranks",
)
