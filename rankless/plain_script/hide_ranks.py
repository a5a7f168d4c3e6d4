"""One process: the script and its libraries find no launcher's variables, no process group and no other rank.

The launcher leaves the variables of ranks out. The ranks' process group lives on without being the default one, so that
`torch.distributed.is_initialized()` is False for everybody; Rankless passes the group to each collective. What would
join ranks or start processes ends with an error.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.config.rank_awareness import LAUNCHER_VARIABLES
from rankless.errors import ConfigError
from rankless.user_code import caller_line

REFUSED = {
    "torch.distributed.init_process_group": ("torch.distributed.distributed_c10d", "torch.distributed.device_mesh"),
    "torch.multiprocessing.spawn": ("torch.multiprocessing.spawn",),
    "torch.multiprocessing.start_processes": ("torch.multiprocessing.spawn",),
}
"""Functions that join ranks or start processes, and the modules that have them too."""
WAY_OUT = "start it with `rankless run --separate`, which runs a copy of the script on each worker"


def make_refusal(name: str) -> ConfigError:
    """Return the error for a use of something that needs ranks."""
    return ConfigError(
        expected="a script that uses no other process, in the logical view",
        found=name,
        fix=WAY_OUT,
        where=caller_line(),
    )


def explain(error: BaseException) -> None:
    """Add the way out to an error of a script that looked for ranks."""
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    is_variable = isinstance(missing, str) and LAUNCHER_VARIABLES.fullmatch(missing)
    if is_variable or (isinstance(error, ValueError) and "process group has not been initialized" in str(error)):
        error.add_note(f"In the logical view the script is one process: {WAY_OUT}")


@contextlib.contextmanager
def hide_ranks() -> Iterator[None]:
    """Within the context, this process looks like one that no launcher has started."""
    group = dist.group.WORLD
    refused = [
        (sys.modules[module], name, refuse(f"{package}.{name}"))
        for package, _, name in (path.rpartition(".") for path in REFUSED)
        for module in (package, *REFUSED[f"{package}.{name}"])
        if hasattr(sys.modules.get(module), name)
    ]
    data_parallel = torch.nn.parallel.DataParallel
    ddp = torch.nn.parallel.DistributedDataParallel
    with replace_attributes(
        *refused,
        (ddp, "__init__", refuse("torch.nn.parallel.DistributedDataParallel")),
        (data_parallel, "__init__", make_data_parallel),
        (data_parallel, "forward", run_data_parallel),
    ):
        groups._update_default_pg(None)  # no public way
        try:
            yield
        finally:
            groups._update_default_pg(group)


def refuse(name: str) -> Callable[..., Any]:
    """Return a function that refuses to do what the one of that name does."""

    def refused(*_arguments: Any, **_keywords: Any) -> Any:
        raise make_refusal(name)

    return refused


def make_data_parallel(self: "nn.DataParallel[Any]", module: nn.Module, *_devices: Any, **_others: Any) -> None:
    """Make a `DataParallel` that runs its module on one device."""
    nn.Module.__init__(self)
    self.module, self.device_ids = module, []
    if torch.cuda.is_available():
        module.to(torch.cuda.current_device())


def run_data_parallel(self: "nn.DataParallel[Any]", *inputs: Any, **keywords: Any) -> Any:
    """Run the module of a `DataParallel` on whole batches, moved to its device."""
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        inputs, keywords = pytree.tree_map_only(Tensor, lambda item: item.to(device), (inputs, keywords))
    return self.module(*inputs, **keywords)
