"""Decides from a program's source whether it knows ranks. If it does not, several workers run it as one training.

Nothing is imported or run. A wrong guess is safe in both directions: the user reads what was decided; a program that
uses ranks in the logical view ends with an error; and copies of one training are told at their second step.
"""

import ast
import functools
import importlib
import os
import re
import sys
from collections.abc import Container, Iterator, Mapping
from typing import Literal, NamedTuple

from rankless.config.extensions import list_aliases
from rankless.config.program_source_files import SourceFile, own_files
from rankless.config.run_config import Program, ScriptView
from rankless.errors import ConfigError
from rankless.records.parallel_plan import ZeroLevel

RANK_NAMES = frozenset(
    {
        "torch.distributed",
        "torch.multiprocessing.spawn",
        "torch.multiprocessing.start_processes",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed",
        "torch.utils.data.DistributedSampler",
        "torch.utils.data.distributed",
        *("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "trl"),
        *(
            "transformers.Trainer",
            "transformers.Seq2SeqTrainer",
            "transformers.trainer",
            "transformers.trainer_seq2seq",
        ),
        *("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments", "transformers.training_args"),
        *("sentence_transformers.SentenceTransformerTrainer", "setfit.Trainer", "datasets.distributed"),
        *("ignite.distributed", "fastai.distributed", "catalyst", "mmengine", "composer", "ultralytics"),
        *("deepspeed", "megatron", "colossalai", "fairscale", "torchft", "torchrec", "torchtitan", "bagua"),
        *("torch_xla", "mpi4py", "ray", "paddle", "byteps", "smdistributed", "hivemind"),
    }
)
"""Modules and names, also with what lies below them, of programs that know ranks or whose library does."""
JOINS = ("torch.distributed.init_process_group", "torch.distributed.init_device_mesh", "torch.distributed.device_mesh")
"""Names of programs that join ranks beyond doubt: their users need not read it."""
LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|SLURM_(PROCID|LOCALID|NTASKS)"
    r"|PMIX?_(RANK|SIZE)|MV2_COMM_WORLD_\w+|OMPI_COMM_WORLD_\w+|TORCHELASTIC_\w+|JOB_COMPLETION_INDEX"
)
RANK_OPTIONS = ("--local_rank", "--local-rank")
PLAIN_NAMES = frozenset(
    f"rankless.{name}"
    for name in ("logical", "shard_batch", "loader", "once", "errors", "RanklessError", "__version__")
)
"""What a program of Rankless may use without a job."""
ASKS = "rankless.logical"
IMPORT_FUNCTIONS = ("import_module", "__import__")
TORCH_REQUIREMENT = re.compile(
    r"torch(vision|audio)?\s*(?=[\[(<>=!~;]|$)(?!.*extra\s*==(?!\s*.torch\b))", re.IGNORECASE
)


SHARDED: Mapping[ZeroLevel | None, str] = {
    None: "batches",
    "optimizer": "batches and optimizer state",
    "gradients": "batches, gradients and optimizer state",
}
"""What the logical view divides, by `--zero`."""


def describe_view(view: ScriptView, workers: int) -> str:
    """Return what was decided, why, and the other option, in a line."""
    if view.is_logical:
        return (
            f"{view.reason}: one training, its {SHARDED[view.zero]} divided between {workers} workers (--separate runs "
            f"{workers} copies)"
        )
    return f"{view.reason}: it runs as {workers} ranks (--logical divides the batches of one training)"


def read_zero(text: str) -> ZeroLevel:
    """Return what the logical view shards. Raises `ConfigError` for anything that it cannot shard."""
    level = next((known for known in SHARDED if known == text), None)
    if level is None:
        raise ConfigError(
            expected="zero as optimizer or gradients: a script that knows no ranks has whole parameters",
            found=text,
            fix='choose one of these; a job shards parameters too: @rankless.job(zero="parameters")',
        )
    return level


class Use(NamedTuple):
    """What a program uses: a module that it imports, a name in one, or a launcher's variable."""

    kind: Literal["module", "name", "variable"]
    name: str
    line: str

    def is_below(self, prefixes: Container[str]) -> bool:
        """Return whether its name is one of some, or lies below one."""
        parts = self.name.split(".")
        return any(".".join(parts[:count]) in prefixes for count in range(1, len(parts) + 1))

    @property
    def package(self) -> str:
        """The package that has it; "" for a variable."""
        return "" if self.kind == "variable" else self.name.partition(".")[0]

    @property
    def needs_ranks(self) -> bool:
        """Whether it is a name of Rankless that has no meaning in the logical view."""
        is_import = self.kind == "module" and self.name == "rankless"
        return self.package == "rankless" and not is_import and not self.is_below(PLAIN_NAMES)


def decide_view(program: Program) -> ScriptView:
    """Return how several workers run a program whose user does not say it."""
    name = program.target if program.kind == "module" else os.path.basename(program.target)
    name = "the code" if program.kind == "code" else name
    uses = [use for file in own_files(program) for use in list_uses(file)]
    if any(use.name == ASKS for use in uses):
        return ScriptView(True, f"{name} asks for the logical view")
    if any(use.needs_ranks or use.is_below(JOINS) for use in uses):
        return ScriptView(False, "")
    evidence = next((use for use in uses if use.kind == "variable" or use.is_below(RANK_NAMES)), None)
    packages = {use.package for use in uses} - {""}
    others = packages - sys.stdlib_module_names - {"torch", "numpy", "rankless"}
    if evidence is None and others:
        names = {each for name, alias in list_aliases().items() for each in (name, alias.target)}
        evidence = next((use for use in uses if use.is_below(names)), None)
    if evidence is not None and evidence.kind != "variable":
        return ScriptView(False, f"{name} uses {evidence.name} ({evidence.line})")
    if not packages & {"torch", "rankless"} and not any(requires_torch(package) for package in sorted(others)):
        return ScriptView(False, "")  # copies of a program that trains nothing
    if evidence is not None:
        return ScriptView(False, f"{name} reads {evidence.name} ({evidence.line})")
    return ScriptView(True, f"{name} knows no ranks")


def list_uses(file: SourceFile) -> Iterator[Use]:
    """Yield what a file uses, without modules that lie beside the program."""
    if file.tree is None:
        return
    is_beside = functools.cache(file.has_beside)
    where = f"{os.path.basename(file.path)}:" if file.path else "line "
    names: set[str] = set()
    for kind, name, node in list_names(file.tree):
        names.add(name)
        if not is_beside(name.partition(".")[0]):
            yield Use(kind, name, f"{where}{node.lineno}")
    reads_environment = bool(
        names & {"os.environ", "os.getenv"} or any(name.startswith("os.environ.") for name in names)
    )
    for text, line in list_texts(file.tree):
        if text in RANK_OPTIONS or (reads_environment and LAUNCHER_VARIABLES.fullmatch(text)):
            yield Use("variable", text, f"{where}{line}")


def list_names(tree: ast.Module) -> Iterator[tuple[Literal["module", "name"], str, ast.stmt | ast.expr]]:
    """Yield the modules that a file imports, and the names in them that it uses, each under its full name."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                yield "module", alias.name, node
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                yield "name", name, node
    # Of `a.b.c` the names `a` and `a.b` say less.
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            first, _, rest = ast.unparse(node).partition(".") if is_dotted(node) else ("", "", "")
            if first in known:
                yield "name", f"{known[first]}.{rest}" if rest else known[first], node
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORT_FUNCTIONS:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield "module", str(argument.value), node


def is_dotted(node: ast.expr) -> bool:
    """Return whether an expression is a name, or attributes of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def list_texts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the texts in a file, except docstrings, with their lines."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value, node.lineno


def requires_torch(package: str) -> bool:
    """Return whether the installed distribution of a package requires PyTorch, or can use it."""
    metadata = importlib.import_module("importlib.metadata")  # it takes 40 ms, and most programs import torch
    try:
        found = [metadata.distribution(package)]
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package, ())
        found = [metadata.distribution(name) for name in names]
    return any(TORCH_REQUIREMENT.match(line) for each in found for line in each.requires or ())
