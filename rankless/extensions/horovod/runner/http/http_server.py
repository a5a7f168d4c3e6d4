"""`horovod.runner.http.http_server`: can be imported. The processes meet in the store of the run."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup(
    "horovod.runner.http.http_server", "`rankless horovodrun`, whose processes meet in the store of the run"
)
