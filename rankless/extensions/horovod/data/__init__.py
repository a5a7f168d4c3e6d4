"""Data loaders that read batches in a thread, as `horovod.data` has them. Scripts derive their loaders from them."""

from rankless.extensions.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
