"""`horovod.metadata`: can be imported. Rankless describes its build by other functions."""

from rankless.extensions.horovod.without_counterpart import make_lookup

__getattr__ = make_lookup(
    "horovod.metadata",
    "horovod.__version__ and the functions of horovod.torch that report the build, such as gloo_built",
)
