"""What `import rankless` offers a script. Each function hands the process's world to the views."""

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from rankless import checkpoint
from rankless.collectives.broadcast_state import require_synchronized
from rankless.config.environment import is_launched
from rankless.context.once import call_once, require_not_in_once
from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions, Reading
from rankless.data.shard_check import ShardsWanted, require_shards
from rankless.errors import ConfigError
from rankless.jobs.definition import Stepping
from rankless.jobs.job import Job, Models, Optimizers, make_job
from rankless.jobs.mirrored import Local
from rankless.jobs.placeholders import PerDevice, Whole
from rankless.launch.self_launch import Elsewhere, relaunch
from rankless.launch.spawning import Spawned
from rankless.launch.spawning import spawn as spawn_workers
from rankless.records.events import AnyRecord, Notice, Progress
from rankless.runtime.current_process import current, join_by, joined_at, leave
from rankless.runtime.process_context import Observer, Runtime
from rankless.runtime.rendezvous.address import read_invitation
from rankless.runtime.rendezvous.job_store import JOINING_SECONDS
from rankless.terminal.progress import ProgressDisplay

__all__ = [
    "PerDevice",
    "Whole",
    "check_shards",
    "check_synchronized",
    "checkpoints",
    "configure",
    "init",
    "job",
    "load",
    "loader",
    "local",
    "local_rank",
    "once",
    "rank",
    "save",
    "shutdown",
    "spawn",
    "world_size",
]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def init(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_seconds: float = JOINING_SECONDS,
) -> None:
    """Join the job, and return once all its processes are there; every few seconds says who is missing.

    Without arguments as the launcher says: `rankless run`, torchrun and their like; a process that was started alone is
    a job of one. With `address` the processes meet at "tcp://HOST:PORT", where rank 0 listens on that address only, or
    at "file:///SHARED/PATH", a file that all hosts see; `rank` and `world_size` are then this process's number and how
    many there are. After `shutdown` it may be called again. Scripts that only use jobs and loaders need not call it.
    Raises `ConfigError` for arguments that cannot be meant, and `JoinError` if the processes do not come together.
    """
    if address is not None:
        invitation = read_invitation(address, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)
        join_by(invitation, observer=_watch_alone)
        return
    if rank is not None or world_size is not None:
        raise ConfigError(
            expected="rank= and world_size= beside an address",
            found=f"rank={rank}, world_size={world_size} and no address",
            fix='name where to meet: rankless.init("tcp://10.0.0.1:29500", rank=…, world_size=…)',
        )
    _current().make_group()


def shutdown() -> None:
    """Leave the job: end its process group, once what is saved in the background is on disk. `init` may join again."""
    leave()


def configure(
    *,
    devices_per_host: int,
    hosts: Sequence[Any] | None = None,
    port: int | None = None,
    insecure: bool = False,
) -> None:
    """Let plain `python train.py` train on `devices_per_host` devices of this host, as `rankless run -n` does.

    The process becomes the launcher of its own script: this call does not return there, and returns at once in the
    workers, which run the script from its beginning. It may stand anywhere before the first call of a job, a loader or
    CUDA, also after the jobs are defined. A launcher's command line has the last word. Raises `ConfigError` later than
    that, and in the interactive interpreter and notebooks, where `rankless.spawn` is the way.

    With `hosts` (names or addresses, or dicts of one under "addr") it is typed on each of them: each finds itself by
    its own addresses, and they meet at `port` (9988) of the first, which plans, prints and saves. The job's token comes
    from the file RANKLESS_TOKEN_FILE, else by ssh from the first; `insecure=True` does without.
    """
    line = joined_at()
    uses_others = torch.cuda.is_initialized() or torch.distributed.is_initialized()
    if line is not None or (uses_others and not is_launched()):
        begun = "use CUDA or torch.distributed" if line is None else f"train: {line} was the first call"
        raise ConfigError(
            expected="rankless.configure before the first call of a job, a loader or CUDA",
            found=f"a process that has begun to {begun}",
            fix="move it up: right below the imports, say",
        )
    if hosts is None and (port is not None or insecure):
        raise ConfigError(
            expected="hosts= beside port= and insecure=",
            found=f"port={port}, insecure={insecure} and no hosts",
            fix='name the hosts: hosts=["10.0.0.1", "10.0.0.2"]; one host needs no port',
        )
    relaunch(devices_per_host, None if hosts is None else Elsewhere(hosts=hosts, port=port, insecure=insecure))


def check_synchronized(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise `RanksDiverged` on every rank, naming tensors and ranks, unless parameters, buffers and the optimizer's
    state
    are the same bits on all.
    """
    world = _current().world
    require_not_in_once(world, "rankless.check_synchronized")
    if world.mesh.size > 1:
        require_synchronized(model, optimizer)


def check_shards(loader: Any, *, all_samples: bool = True, even: bool = True, batches: int | None = None) -> None:
    """Raise `RanksDiverged` on every rank, naming ranks and samples, unless the ranks divide the data: no sample of the
    next pass comes to two, each comes to one (with `all_samples`), and all have as many batches (with `even`).

    `loader` is this rank's DataLoader, its sampler, a `rankless.loader`, or whatever gives batches whenever it is
    iterated. Samplers are asked for indices, and three samples are read; random numbers and samplers are left as they
    are. Of streams, and where each rank has a data set of its own, a whole pass is read, and compared by what the rows
    hold; then equal samples below a tenth, which may be equal in the data, are only said. `batches` looks at so many of
    each rank only. What torch's DistributedSampler repeats at the end is said. Raises `ConfigError` for what has no
    batches.
    """
    world = _current().world
    require_not_in_once(world, "rankless.check_shards")
    if world.mesh.size > 1:
        wanted = ShardsWanted(all_samples=all_samples, even=even, batches=batches)
        require_shards(loader, wanted, mesh=world.mesh, notify=world.notify)


def spawn(
    function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True
) -> list[Any] | Spawned:
    """The results of `function(rank, *args)`, by rank, run in `nprocs` new processes of this host.

    The function may be defined in a script, a notebook or the interpreter, and the script needs no guard: it is not run
    again. In it `rankless.init()` and torch's `init_process_group()` find the others. What it raises on a worker is
    raised here, with rank and traceback, once the other workers are ended; a worker that dies is a `LaunchError`. With
    `join=False` a handle is returned at once: `join(timeout_seconds)`, `terminate()`, `process_ids`.
    """
    return spawn_workers(function, args, nprocs, join)


def rank() -> int:
    """This process's number in the job, from 0."""
    return _current().world.mesh.rank


def world_size() -> int:
    """How many processes train together; 1 without a launcher."""
    return _current().world.mesh.size


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return _current().local_rank


def once(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """What `function` returns on rank 0, the only one that calls it, on every rank.

    Tensors, NumPy arrays, paths, dates, enums, tuples, sets, named tuples, dataclasses and plain data keep their
    types. If `function` raises, every rank raises: rank 0 what it was, the others a `RanklessError` that names it.
    Inside `function` only rank 0 is there: `once` calls directly, and what needs all ranks is refused.
    """
    world = _current().world
    return call_once(lambda: function(*args, **kwargs), name=_name(function), world=world)


def job(
    *,
    model: Models,
    optimizer: Optimizers | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    gradient_norm: bool = False,
    check_finite: bool = False,
    view: str | None = None,
    check_synchronized_every: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[Callable[Arguments, Result]], Job[Arguments, Result]]:
    """A decorator that makes a function on whole batches a job: written for one device, run on all of them.

    `model` is a module, or a list or dict of modules: all that the function uses. With an `optimizer` (or several,
    stepped in turn) it is a train job: it returns its loss (alone, first in a tuple, or as "loss" in a dict; one per
    sample means its mean), and a call makes zero_grad, backward and step. Without one it predicts, without gradients.
    Calls return the whole batch's results, the same on every rank.

    With `view="mirrored"` it runs as plain PyTorch, once per device, on that device's element of each list it is given,
    and returns the list of all results. Arguments annotated with `Whole` or `PerDevice` (which implies that view) are
    checked before a call. `dtype` is that of placeholders and of tensors made in the function that name none.

    `accumulate=k` makes one step of k calls: that of one call on all their rows. The end of a pass over a loader, or
    `flush()` of the job, makes the step of a shorter last group; `stepped` tells whether a call made one.
    `clip_norm` and `clip_value` limit the whole gradient before each step, over all parameters of the optimizers;
    with `gradient_norm=True` (or `clip_norm`) the job's `gradient_norm` is the norm before clipping.
    `check_finite=True` raises `StepError` instead of stepping on a loss or gradient that is not finite.

    Tensors hold the batch in dim 0, unless `batch_dims` names another for an argument, or None: this decides what a
    call costs, not its result. Models are compared between ranks at the first call, when changed outside jobs, and
    before every `check_synchronized_every`-th call. Raises `ConfigError`, `DataError`; with `accumulate` or several workers also
    `CaptureError` for what cannot be one program, and `RanksDiverged`.
    """
    stepping = Stepping(
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_value,
        gradient_norm=gradient_norm,
        check_finite=check_finite,
        check_synchronized_every=check_synchronized_every,
    )

    def decorate(function: Callable[Arguments, Result]) -> Job[Arguments, Result]:
        made = make_job(function, model=model, optimizer=optimizer, view=view, world=_world, stepping=stepping)
        return made.mark(batch_dims or {}, dtype)

    return decorate


def local(value: Any) -> Any:
    """This device's own element of an argument of a job in the mirrored view, where the others pass theirs."""
    return Local(value)


def loader(
    dataset: Any,
    *,
    batch_size: int | None = 1,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    generator: torch.Generator | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    timeout: float = 0,
    device: str | torch.device | None = None,
    reading: Reading = "split",
) -> Loader:
    """An iterable of whole batches, in exactly the order of a one-process DataLoader; `batch_size` is the
    whole's, and the other names are DataLoader's.

    `reading` is "split" (each rank reads its own samples only; of a stream, collates its own only), "replicated"
    (each reads all, with the random numbers of a plain DataLoader) or "first" (rank 0 reads, and sends each its
    rows). `device` is where batches are handed out, on a GPU copied ahead. `state_dict()` and
    `load_state_dict()` take up an interrupted epoch with its next batch.
    """
    options = LoaderOptions(
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        sampler=sampler,
        batch_sampler=batch_sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        generator=generator,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        pin_memory=pin_memory,
        timeout=timeout,
        device=device,
        reading=reading,
    )
    return Loader(dataset, options=options, world=_world)


def save(
    path: str | os.PathLike[str],
    *,
    layout: checkpoint.Layout = "whole",
    background: bool = False,
    extra: Any = None,
    **objects: Any,
) -> None:
    """Write the state of `objects` (anything with a `state_dict`) and of all random generators to the folder `path`.

    `layout` is "whole" (one file, by rank 0) or "sharded" (a file by each rank). With `background` the state is copied
    and written while the script goes on; the next save or load, and the end of the script, wait for it and raise its
    error. `extra` is plain data that `load` gives back: numbers, text, lists, dicts, tensors. Raises `CheckpointError`.
    """
    options = checkpoint.SaveOptions(layout=layout, background=background, extra=extra)
    _current().saver.save(path, objects, options=options)


def load(path: str | os.PathLike[str], *, strict: bool = True, random: bool = True, **objects: Any) -> Any:
    """The `extra` of the checkpoint in the folder `path`, once `objects` have the state saved under their names.

    With `strict=False` modules take what fits and keep the rest; what was left out is said. With `random=False` the
    generators stay as they are. Any number of workers may load what any number has saved. Raises `CheckpointError`.
    """
    saver = _current().saver
    saver.wait()
    loaded = checkpoint.load(path, objects, mesh=saver.mesh, strict=strict, random=random)
    if loaded.left_out:
        _world().notify(f"loading {os.fspath(path)} left out:\n{loaded.left_out}")
    return loaded.extra


def checkpoints(
    folder: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_best: int = 0,
    mode: checkpoint.Mode = "min",
    layout: checkpoint.Layout = "whole",
    background: bool = False,
) -> checkpoint.Checkpoints:
    """The row of checkpoints in `folder`: `.save(step, metric=…, model=…)`, `.load(model=…)`, `.latest`, `.best`.

    Of those saved the last `keep_last` stay (None: all) and the `keep_best` of the least metric (`mode="max"`: of the
    most); the others are removed once a new one is on disk. `layout` and `background` are as for `save`.
    """
    return checkpoint.Checkpoints(
        folder,
        keeping=checkpoint.Keeping(keep_last=keep_last, keep_best=keep_best, mode=mode),
        options=checkpoint.SaveOptions(layout=layout, background=background),
        saver=lambda: _current().saver,
        notify=lambda text: _world().notify(text),
    )


def _world() -> World:
    return _current().world


def _current() -> Runtime:
    return current(observer=_watch_alone)


def _watch_alone() -> Observer:
    """Progress and notices of a script that runs without an agent."""
    display = ProgressDisplay()
    atexit.register(display.close)

    def take(record: AnyRecord) -> None:
        if isinstance(record, Progress):
            display.show(record)
        elif isinstance(record, Notice):
            with display.hidden():
                print(f"rankless: {record.text}", file=sys.stderr)

    return take


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
