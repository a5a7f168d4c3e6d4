"""What OneFlow's pages on distributed training and its two views document, on Rankless.

Scripts write `import oneflow as flow`. A `.pth` file of this distribution lets that name mean this package, unless a
OneFlow is installed. Everything else of OneFlow raises an error that names the way in Rankless.
"""

from . import blobs, config, data, env, initializers, layers, nn, optimizer, scope, train, typing
from .blobs import *  # noqa: F403  # OneFlow has them at its top
from .function_config import function_config
from .initializers import *  # noqa: F403  # OneFlow has them at its top
from .jobs import global_function
from .missing import getattr_of

__all__ = ["config", "data", "env", "function_config", "global_function", "layers", "nn", "optimizer", "scope"]
__all__ += ["train", "typing", *blobs.__all__, *initializers.__all__]

__getattr__ = getattr_of()
