"""What this package does not have: each such name raises an error that says what to write in Rankless."""

from collections.abc import Callable, Mapping
from typing import Any

from rankless.errors import ConfigError

IN_RANKLESS: Mapping[str, str] = {
    "scope.placement": "delete the line: all jobs of a run have all its devices, and --mesh names other divisions",
    "scope.namespace": "give each layer its whole name",
    "get_variable": "make a torch.nn.Parameter in a torch.nn.Module, and pass the module to @rankless.job(model=…)",
    "nn.Module": "write a torch.nn.Module, and pass it to @rankless.job(model=…)",
    "nn.Graph": "write @rankless.job(model=…, optimizer=…) on a function that returns the loss",
    "optim": "use torch.optim, and pass the optimizer to @rankless.job(optimizer=…)",
    "losses": "call flow.optimizer.SGD(…).minimize(loss)",
    "math": "a blob is a torch.Tensor: call PyTorch's function, for example torch.mean(blob)",
    "matmul": "a blob is a torch.Tensor: call torch.matmul",
    "optimizer.grad_clipping": "pass clip_norm= to @rankless.job",
    "distribute": "pass rankless.Plan(tensor=…) to @rankless.job, and start the run with --mesh",
    "watch": "return the blob from the job",
    "global_function_config": "call flow.function_config()",
    "FunctionConfig": "call flow.function_config()",
    "function": "write @flow.global_function(type=…)",
    "sbp": "see docs/guides/from-oneflow.md, Signatures",
    "placement": "see docs/guides/from-oneflow.md, Signatures",
    "load": "call flow.train.CheckPoint().load(path)",
    "save": "call flow.train.CheckPoint().save(path)",
}
"""What to write instead, for the names that scripts use most."""


class MissingNameError(ConfigError, AttributeError):
    """Raised for a name of OneFlow that this package does not have. `hasattr` answers False for it."""


def refuse(name: str, found: str, fix: str | None = None, where: str | None = None) -> ConfigError:
    """Return the error for an argument or a value that this package does not take."""
    return ConfigError(
        expected=f"{name} as OneFlow's pages on distributed training and its two views document it",
        found=found,
        fix=fix or "leave it out, or write the job with rankless.job: docs/guides/from-oneflow.md has the names",
        where=where,
    )


def refuse_given(function: str, **arguments: Any) -> None:
    """Raise `ConfigError` for the first argument that is not None: this package does not take it."""
    for name, value in arguments.items():
        if value is not None:
            raise refuse(function, f"{name}={value!r}")


def getattr_of(part: str = "") -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of this package; `part` is its name below `oneflow`, such as "nn"."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{part}.{name}" if part else name
        fix = IN_RANKLESS.get(path) or IN_RANKLESS.get(path.partition(".")[0])
        raise MissingNameError(
            expected="a name of OneFlow's pages on distributed training and its two views: rankless-oneflow has these",
            found=f"oneflow.{path}",
            fix=fix or "write it with PyTorch and rankless.job: docs/guides/from-oneflow.md has the names",
        )

    return find
