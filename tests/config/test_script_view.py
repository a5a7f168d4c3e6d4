"""Whether a program knows ranks: decided from its source."""

from pathlib import Path

import pytest

from rankless.config.make_run_config import make_run_config
from rankless.config.mesh_option import parse_mesh
from rankless.config.rank_awareness import decide_view, requires_torch
from rankless.config.run_config import Program, RunRequest, ScriptView
from rankless.errors import ConfigError

PLAIN = {
    "an ordinary loop": "import torch\nfrom torch import nn, optim\noptim.SGD(nn.Linear(2, 1).parameters(), 0.1)",
    "a comment": "import torch  # not torch.distributed, RANK or accelerate",
    "a docstring": '"""Needs no os.environ["RANK"], torch.distributed."""\nimport torch, os\nos.environ["HOME"]',
    "a docstring of a function": 'import os, torch\ndef f():\n    "RANK"\n    return os.environ',
    "other names": "import torch\nfrom torch.distributions import Normal\nnext_rank = 3\nWORLD_SIZE = 4",
    "a text that is no variable": 'import torch\nrow = {"RANK": 1}\nprint(row["RANK"])',
    "data parallel": "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(2, 1))",
    "processes of a loader": "import torch\nimport torch.multiprocessing as mp\nmp.set_sharing_strategy('file_system')",
    "a model of transformers": "from transformers import AutoModel, BertConfig\nAutoModel.from_config(BertConfig())",
    "a loop of Rankless's loader": "import rankless, torch\nfor x in rankless.loader([1], batch_size=1): print(x)",
    "once": "import torch\nfrom rankless import once, loader as batches\nonce(print, 1)",
    "an import of Rankless": "import rankless, torch",
    "other variables": "import os, torch\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nos.environ.get('RANKING', 0)",
    "a variable that shadows nothing": "import torch\nray = torch.zeros(3)\nray.sum()\nclass accelerate: pass",
    "its own module of that name": "import torch\nimport helper",
    "lightning in a text": "import torch\nprint('import lightning')",
}

RANKS = {
    "import torch.distributed": ("uses", "torch.distributed", "import torch.distributed"),
    "import torch.distributed as d": ("uses", "torch.distributed", "import torch.distributed as d"),
    "from torch import distributed as d": ("uses", "torch.distributed", "from torch import distributed as d"),
    "attribute": ("uses", "torch.distributed.is_initialized", "import torch\ntorch.distributed.is_initialized()"),
    "attribute of an alias": ("uses", "torch.distributed.barrier", "import torch as t\nt.distributed.barrier()"),
    "a nested module": ("uses", "torch.distributed.fsdp.fully_shard", "from torch.distributed.fsdp import fully_shard"),
    "a star": ("uses", "torch.distributed.*", "from torch.distributed import *"),
    "in a function": ("uses", "torch.distributed", "import torch\ndef f():\n    import torch.distributed as dist"),
    "import_module": (
        *("uses", "torch.distributed"),
        "import importlib\nd = importlib.import_module('torch.distributed')",
    ),
    "import_module alone": (
        *("uses", "torch.distributed.rpc"),
        "from importlib import import_module as load, import_module\nimport_module('torch.distributed.rpc')",
    ),
    "__import__": ("uses", "mpi4py", "import torch\n__import__('mpi4py')"),
    "DistributedDataParallel": (
        *("uses", "torch.nn.parallel.DistributedDataParallel"),
        "import torch.nn as nn\nnn.parallel.DistributedDataParallel(nn.Linear(1, 1))",
    ),
    "DistributedSampler": (
        *("uses", "torch.utils.data.DistributedSampler"),
        "from torch.utils.data import DataLoader, DistributedSampler as S",
    ),
    "DistributedSampler by its module": (
        *("uses", "torch.utils.data.distributed.DistributedSampler"),
        "from torch.utils.data.distributed import DistributedSampler",
    ),
    "spawn": ("uses", "torch.multiprocessing.spawn", "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)"),
    "accelerate": ("uses", "accelerate.Accelerator", "import torch\nfrom accelerate import Accelerator"),
    "lightning": ("uses", "lightning", "import lightning as L"),
    "pytorch_lightning": ("uses", "pytorch_lightning.Trainer", "from pytorch_lightning import Trainer"),
    "fabric": ("uses", "lightning_fabric.Fabric", "from lightning_fabric import Fabric"),
    "a try": ("uses", "horovod.torch", "import torch\ntry:\n    import horovod.torch as hvd\nexcept ImportError: pass"),
    "Horovod": ("uses", "horovod.torch", "import torch, horovod.torch as hvd"),
    "trainer": ("uses", "transformers.Trainer", "import torch\nfrom transformers import BertConfig, Trainer"),
    "trainer by its module": ("uses", "transformers.Seq2SeqTrainer", "import transformers as t\nt.Seq2SeqTrainer()"),
    "mpi4py": ("uses", "mpi4py.MPI", "from mpi4py import MPI\nimport torch"),
    "environ": ("reads", "RANK", "import os, torch\nrank = int(os.environ.get('RANK', 0))"),
    "environ of an alias": ("reads", "LOCAL_RANK", "import os as o, torch\ne = o.environ\nprint(e['LOCAL_RANK'])"),
    "getenv": ("reads", "WORLD_SIZE", "from os import getenv\nimport torch\nsize = getenv('WORLD_SIZE', '1')"),
    "environ imported": ("reads", "SLURM_PROCID", "from os import environ\nimport torch\n'SLURM_PROCID' in environ"),
    "a constant": ("reads", "RANK", "import os, torch\nNAME = 'RANK'\nprint(os.environ[NAME])"),
    "set": ("reads", "MASTER_ADDR", "import os, torch\nos.environ['MASTER_ADDR'] = 'localhost'"),
    "MPI's": ("reads", "OMPI_COMM_WORLD_RANK", "import os, torch\nos.getenv('OMPI_COMM_WORLD_RANK')"),
    "option": (
        "reads",
        "--local_rank",
        "import argparse, torch\nargparse.ArgumentParser().add_argument('--local_rank')",
    ),
    "beside": ("uses", "torch.distributed", "import torch\nimport setup_ranks"),
    "in a package beside": ("uses", "torch.distributed", "import torch\nfrom tools.deep import ranks"),
}

UNTOLD = {
    "no PyTorch": "print('hello')",
    "no PyTorch but a rank": "import os\nprint(os.environ['RANK'])",
    "no PyTorch but arrays": "import numpy, msgspec, json",
    "a job": "import rankless, torch\n@rankless.job(model=torch.nn.Linear(1, 1))\ndef f(): pass",
    "a job of an alias": "import rankless as r, torch\nr.job",
    "the module itself": "import rankless, torch\njob = getattr(rankless, 'job')",
    "the rank": "import torch\nfrom rankless import rank, loader",
    "a star": "import torch\nfrom rankless import *",
    "collectives": "import torch\nimport rankless.collectives",
    "a process group": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "a mesh": "from torch.distributed.device_mesh import init_device_mesh\nimport os\nos.environ['RANK']",
    "text that does not parse": "import torch\nfor",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of a test, which has some modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup_ranks.py").write_text("import torch.distributed as dist\n")
    (tmp_path / "tools" / "deep").mkdir(parents=True)
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "deep" / "__init__.py").touch()
    (tmp_path / "tools" / "deep" / "ranks.py").write_text("from torch import distributed\ndistributed.get_rank()\n")
    (tmp_path / "helper.py").write_text("from composer import play\nimport composer\ncomposer.play()\n")
    (tmp_path / "composer.py").write_text("def play(): pass\n")
    return tmp_path


def decide(text: str) -> ScriptView:
    """Return the decision about a script, which must be that about the same text as code and as a module."""
    Path("train.py").write_text(text)
    script = decide_view(Program(kind="script", target="train.py"))
    module = decide_view(Program(kind="module", target="train"))
    code = decide_view(Program(kind="code", target=text))
    assert script.is_logical == module.is_logical == code.is_logical
    assert script.reason.replace("train.py", "") == module.reason.replace("train.py", "").replace("train", "", 1)
    assert bool(script.reason) == bool(code.reason)
    return script


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_an_ordinary_script_runs_in_the_logical_view(text: str) -> None:
    assert decide(text) == ScriptView(True, "train.py knows no ranks")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("verb", "name", "text"), RANKS.values(), ids=RANKS)
def test_a_script_that_knows_ranks_keeps_them_and_its_user_reads_the_line(verb: str, name: str, text: str) -> None:
    is_logical, reason, _ = decide(text)
    assert not is_logical
    assert reason.startswith(f"train.py {verb} {name} (")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("text", UNTOLD.values(), ids=UNTOLD)
def test_a_script_of_jobs_or_without_pytorch_keeps_its_ranks_without_a_word(text: str) -> None:
    assert decide(text) == ScriptView(False, "")


@pytest.mark.usefixtures("folder")
def test_the_line_is_that_of_the_file_which_has_the_word() -> None:
    assert decide("import torch\n\nimport setup_ranks").reason == "train.py uses torch.distributed (setup_ranks.py:1)"
    assert decide("import torch\n\nimport mpi4py").reason == "train.py uses mpi4py (train.py:3)"
    code = Program(kind="code", target="import torch\nimport mpi4py")
    assert decide_view(code).reason == "the code uses mpi4py (line 2)"


@pytest.mark.usefixtures("folder")
def test_a_script_may_ask_for_the_view_whatever_else_it_uses() -> None:
    text = "import os, rankless, torch, torch.distributed\nrankless.logical()\nrankless.job"
    assert decide(text) == ScriptView(True, "train.py asks for the logical view")
    assert decide("from rankless import logical\nlogical()").is_logical


def test_packages_that_need_pytorch_or_can_use_it_count_as_pytorch() -> None:
    assert requires_torch("accelerate")
    assert requires_torch("transformers")  # by the extra "torch"
    assert not requires_torch("msgspec")
    assert not requires_torch("sklearn")  # scikit-learn: another name
    assert not requires_torch("nothing_of_that_name")


def request(view: str, count: int = 2, **others: object) -> RunRequest:
    """Return the request of a run on the CPU."""
    return RunRequest(worker_count=count, devices="cpu", view=view, **others)  # type: ignore[arg-type]


@pytest.fixture
def plain(folder: Path) -> Program:
    """Return a plain script."""
    (folder / "plain.py").write_text("import torch")
    return Program(kind="script", target="plain.py")


def test_only_several_workers_and_only_rankless_run_choose_the_view(plain: Program) -> None:
    assert make_run_config(plain, request("auto")).view.is_logical
    assert make_run_config(plain, request("auto", mesh=parse_mesh("data=2"))).view.is_logical
    assert make_run_config(plain, request("logical")).view.is_logical
    assert make_run_config(plain, request("auto")).seed is not None
    assert not make_run_config(plain, request("separate")).view.is_logical
    assert not make_run_config(plain, request("auto", count=1)).view.is_logical
    assert not make_run_config(plain, request("logical", count=1)).view.is_logical
    assert not make_run_config(plain, RunRequest(worker_count=2, devices="cpu")).view.is_logical
    assert not make_run_config(plain, request("auto", mesh=parse_mesh("tensor=2"))).view.is_logical


def test_a_view_that_a_run_cannot_have_is_refused(plain: Program) -> None:
    with pytest.raises(ConfigError, match="found:    a mesh with the axis tensor"):
        make_run_config(plain, request("logical", count=4, mesh=parse_mesh("data=2,tensor=2")))
    with pytest.raises(ConfigError, match="found:    the command true"):
        make_run_config(Program(kind="command", target="true"), request("logical"))
    with pytest.raises(ConfigError, match="found:    options of servers"):
        make_run_config(plain, request("logical", options={"servers": {"count": 1}}))
