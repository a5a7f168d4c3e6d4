"""`horovod.runner.util.network`: can be imported. The launcher finds addresses and connects hosts."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup(
    "horovod.runner.util.network", "`rankless horovodrun`, and `rankless doctor` to check the connections between hosts"
)
