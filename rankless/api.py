"""The functions and classes that `import rankless` offers.

Each function passes the world of this process on to the part that does the work. Rankless's own functions take every
timeout as `timeout_seconds`, a float in seconds. Arguments that a PyTorch function has too keep PyTorch's name and
unit: the `timeout` of `loader` is `DataLoader`'s, and `rankless.collectives` take `torch.distributed`'s `timedelta`.
"""

import atexit
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from rankless import checkpoint
from rankless.collectives.broadcast_and_compare_state import require_synchronized
from rankless.config.environment import is_launched
from rankless.config.rank_awareness import read_zero
from rankless.context.once_for_all_ranks import call_in_one_process, call_once, require_no_capture
from rankless.context.world import World
from rankless.data.disjoint_shards_check import ShardCheckOptions, require_shards
from rankless.data.loader import Loader, LoaderOptions, Reading
from rankless.data.random_generators import take_process_states
from rankless.deferred_models.build_and_materialize import DeferredBuild
from rankless.errors import ConfigError
from rankless.jobs.declared_argument_shapes import PerDevice, Whole
from rankless.jobs.job import Job, divide_states_of_jobs, make_job
from rankless.jobs.job_definition import Models, Optimizers, RandomSource, StepOptions
from rankless.jobs.views.mirrored import LocalArgument
from rankless.launch.self_launch import ScriptHosts, relaunch, require_script
from rankless.launch.spawn_function import Show, Spawned
from rankless.launch.spawn_function import spawn as spawn_workers
from rankless.parallel.user_plan import Plan, PlanSource, place
from rankless.plain_script.loaders import shard_loaded, shard_whole
from rankless.records.events import AnyRecord, CheckpointLoaded, Notice, Progress
from rankless.records.parallel_plan import Recompute, ZeroLevel
from rankless.runtime.current_context import (
    current_context,
    find_view,
    join_line,
    join_rendezvous,
    leave,
    require_ranks,
)
from rankless.runtime.process_context import ProcessContext, RecordObserver
from rankless.runtime.rendezvous.find_rendezvous import JOIN_TIMEOUT_SECONDS
from rankless.runtime.rendezvous.init_address_and_rank import parse_rendezvous_address
from rankless.runtime.stop_requests import REQUESTS
from rankless.terminal.progress_display import ProgressDisplay
from rankless.user_code import caller_line, display_name

__all__ = [
    "Job",
    "Loader",
    "PerDevice",
    "Plan",
    "Whole",
    "check_shards",
    "check_synchronized",
    "checkpoints",
    "configure",
    "deferred",
    "init",
    "job",
    "load",
    "loader",
    "local",
    "local_rank",
    "logical",
    "once",
    "place",
    "rank",
    "save",
    "shard_batch",
    "shutdown",
    "spawn",
    "stopping",
    "world_size",
]

OF_RANKS = "a function of Rankless for scripts that know ranks"

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Batch = TypeVar("Batch")


def init(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
) -> None:
    """Join the job, and return when all of its processes have joined.

    Call it before `rankless.collectives`, `torch.distributed` or a sampler. Jobs and loaders join by themselves.
    Without arguments the launcher decides: `rankless run`, torchrun and others are recognized, and a process without a
    launcher becomes a job of one. Every few seconds rank 0 warns which ranks are missing. After `shutdown` a process
    may call it again.

    Args:
        address: Where the processes rendezvous without a launcher: "tcp://HOST:PORT", where rank 0 listens, or
            "file:///SHARED/PATH", a new file that all hosts see. Default: the launcher's.
        rank: Number of this process, from 0 to `world_size` - 1. Only with `address`.
        world_size: Number of processes. Only with `address`.
        timeout_seconds: How long to wait for the other processes, in seconds. Only with `address`; a launcher has a
            setting of its own. Default: 1800.

    Raises:
        ConfigError: The arguments contradict each other or the address cannot be read.
        JoinError: A process is missing at the timeout, the address is in use, or two processes have one rank.

    Example:
        >>> rankless.init()
        >>> rankless.rank(), rankless.world_size()
        (0, 1)
        >>> rankless.shutdown()
    """
    if address is not None:
        rendezvous = parse_rendezvous_address(
            address, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds
        )
        join_rendezvous(rendezvous, make_observer=_make_display_observer)
        return
    if rank is not None or world_size is not None:
        raise ConfigError(
            expected="rank= and world_size= beside an address",
            found=f"rank={rank}, world_size={world_size} and no address",
            fix='pass an address: rankless.init("tcp://10.0.0.1:29500", rank=…, world_size=…)',
        )
    _current().make_group()


def shutdown() -> None:
    """Leave the job: wait for background saves, then destroy the process group.

    Call it on every rank, or not at all: the end of the script does the same. Afterwards `init` may join again.

    Raises:
        CheckpointError: A background save failed.

    Example:
        >>> rankless.init()
        >>> rankless.shutdown()
    """
    leave()


def configure(
    *,
    devices_per_host: int,
    hosts: Sequence[Any] | None = None,
    port: int | None = None,
    insecure: bool = False,
) -> None:
    """Train on several devices when the script is started as plain `python train.py`.

    The process becomes the launcher of its own script, as `rankless run -n` is. In that process the call does not
    return; in the workers, which run the script from its first line, it returns at once. Call it before the first call
    of a job, a loader or CUDA. If a launcher started the script, the launcher's settings win.

    Args:
        devices_per_host: Number of workers on each host.
        hosts: Host names or addresses, or dicts with the key "addr". Start the script on each of them; each finds
            itself by its own addresses. Default: this host alone.
        port: TCP port of the first host, where the hosts rendezvous. Only with `hosts`. Default: 9988.
        insecure: Whether to join without the job's token. Without it the token comes from the file that
            RANKLESS_TOKEN_FILE names, or over ssh from the first host. Only with `hosts`.

    Raises:
        ConfigError: The call comes too late, or in a notebook, IPython or the interactive interpreter, where
            `rankless.spawn` works.

    Example:
        >>> rankless.configure(devices_per_host=2)  # doctest: +SKIP
        >>> rankless.world_size()  # doctest: +SKIP
        2
    """
    if devices_per_host != 1 or hosts is not None:
        require_script()
    line = join_line()
    uses_others = torch.cuda.is_initialized() or torch.distributed.is_initialized()
    if line is not None or (uses_others and not is_launched()):
        started = "use CUDA or torch.distributed" if line is None else f"train: {line} was the first call"
        raise ConfigError(
            expected="rankless.configure before the first call of a job, a loader or CUDA",
            found=f"a process that has begun to {started}",
            fix="move the call up, for example right below the imports",
        )
    if hosts is None and (port is not None or insecure):
        raise ConfigError(
            expected="hosts= beside port= and insecure=",
            found=f"port={port}, insecure={insecure} and no hosts",
            fix='pass hosts=["10.0.0.1", "10.0.0.2"], or leave out port= and insecure=',
        )
    relaunch(devices_per_host, None if hosts is None else ScriptHosts(hosts=hosts, port=port, insecure=insecure))


def check_synchronized(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Check that all ranks have the same bits in parameters, buffers and optimizer state.

    Call it on every rank. On one process it does nothing.

    Args:
        model: The module to compare.
        optimizer: The optimizer whose state and settings to compare too. Default: none.

    Raises:
        RanksDiverged: A tensor or a setting differs. Every rank raises, and the text names tensors and ranks.
        RanklessError: The call is inside `rankless.once`.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> rankless.check_synchronized(model)
    """
    world = _current().world
    world.require_not_in_once("rankless.check_synchronized")
    world.joint.meet("rankless.check_synchronized")
    if world.workers.size > 1:
        world.run_for_all(lambda _: require_synchronized(model, optimizer))


def check_shards(loader: Any, *, all_samples: bool = True, even: bool = True, batches: int | None = None) -> None:
    """Check that the ranks divide the data: each sample goes to one rank, and none to two.

    Call it on every rank. On one process it does nothing. It asks samplers for their indices, reads three samples, and
    leaves random number generators and samplers as they were. It reads a whole pass of a stream, or if each rank has a
    data set of its own, and compares samples by value; less than a tenth of equal samples is then only a warning,
    because the data may contain duplicates. It warns about the samples that torch's DistributedSampler repeats.

    Args:
        loader: This rank's `DataLoader`, its sampler, a `rankless.loader`, or any iterable of batches.
        all_samples: Whether every sample must go to some rank.
        even: Whether all ranks must have the same number of batches.
        batches: How many batches of each rank to check. Default: all of them.

    Raises:
        RanksDiverged: Two ranks get a sample, or none does. Every rank raises, and the text names ranks and samples.
        ConfigError: `loader` gives no batches.
        RanklessError: The call is inside `rankless.once`.

    Example:
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
        >>> sampler = rankless.collectives.DistributedSampler(dataset)
        >>> rankless.check_shards(torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler))
    """
    world = _current().world
    world.require_not_in_once("rankless.check_shards")
    if world.mesh.size > 1:
        wanted = ShardCheckOptions(all_samples=all_samples, even=even, batches=batches)
        world.run_for_all(lambda now: require_shards(loader, wanted, mesh=now.mesh, notify=now.notify))


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *,
    show: Show = "first",
) -> list[Any] | Spawned:
    """Run `function(rank, *args)` in new processes on this host, and return the results by rank.

    The function may be defined in a script, in a notebook or in the interpreter. The script does not run again in the
    workers, so it needs no `if __name__ == "__main__"`. In the function, `rankless.init()` and torch's
    `init_process_group()` find the other workers. The workers get copies of models and jobs, so trained values come
    back only in the function's result. All workers start with the caller's random generators, and the caller draws once
    from each. The first call starts a process that has imported torch; it forks the workers, and stays for later calls.

    Args:
        function: The function to run. Its first argument is the worker's rank.
        args: The arguments after the rank; cloudpickle must be able to copy them.
        nprocs: Number of processes. Default: 1.
        join: Whether to wait for the results. If False, return a handle at once.
        show: "first": only rank 0 prints. "all": all workers do.

    Returns:
        The results of the workers by rank; with `join=False` a handle with `join(timeout_seconds)`, `terminate()` and
        `process_ids`.

    Raises:
        ConfigError: `function` is not callable, `nprocs` is less than 1, or `show` is another word.
        LaunchError: A worker ended without a result.
        Exception: The function raised on a worker. The exception is the worker's, with a note that names the rank; the
            other workers have been terminated.

    Example:
        >>> def add(rank, number):
        ...     return number + rank
        >>> rankless.spawn(add, args=(10,), nprocs=2)
        [10, 11]
    """
    __tracebackhide__ = True  # notebooks show the user's frames only
    require_ranks(OF_RANKS)
    return spawn_workers(function, args, nprocs, join, show=show, take_states=take_process_states)


def rank() -> int:
    """Return the number of this process in the job, from 0.

    Returns:
        The rank; 0 without a launcher.

    Example:
        >>> rankless.rank()
        0
    """
    return _current().world.workers.rank


def world_size() -> int:
    """Return the number of processes that train together.

    Returns:
        The number of ranks; 1 without a launcher.

    Example:
        >>> rankless.world_size()
        1
    """
    return _current().world.workers.size


def local_rank() -> int:
    """Return the number of this process on its host, from 0.

    Returns:
        The local rank; 0 without a launcher.

    Example:
        >>> rankless.local_rank()
        0
    """
    return _current().local_rank


def once(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Call `function` on rank 0 only, and return its result on every rank.

    Call it on every rank. Use it for downloads, preprocessing, or a decision that must be the same on all ranks.
    Tensors, NumPy arrays, paths, dates, enums, tuples, sets, named tuples, dataclasses and plain data keep their
    types. Inside `function` another `once` calls its function directly.

    Args:
        function: The function to call on rank 0. It must not call jobs, loaders or collectives.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What `function` returned on rank 0.

    Raises:
        RanklessError: `function` raised on rank 0, or its result is of a type that cannot be sent. Rank 0 raises the
            function's own exception.
        CaptureError: The call is inside a job.
        RanksDiverged: Another rank makes another call.

    Example:
        >>> rankless.once(sorted, [3, 1, 2])
        [1, 2, 3]
    """
    context = _current_in_any_view()
    if context.sees_one_process:  # the script is one process: what the function does happens once in any case
        return call_in_one_process(lambda: function(*args, **kwargs), name=_name(function))
    world = context.world
    return call_once(lambda: function(*args, **kwargs), name=_name(function), world=world)


def stopping() -> bool:
    """Return whether this run has been asked to stop: True on all ranks at the same call.

    Call it on every rank, once per step. From the first call on, SIGTERM does not end the script: break the loop, save,
    and let the script end. `rankless run` then exits with 75, which means "start me again". In a job of Slurm, SIGUSR1
    and SIGUSR2 are requests too, if the script has no handlers of its own. Its own handler of SIGTERM is called too.

    Returns:
        Whether to stop. Once True, it stays so.

    Raises:
        CaptureError: The call is inside a job.
        ConfigError: The first call is not in the main thread.
        RanksDiverged: Another rank makes another call.
        RanklessError: The call is inside `rankless.once`.

    Example:
        >>> for step in range(3):
        ...     if rankless.stopping():
        ...         break
        >>> step
        2
    """
    require_no_capture("rankless.stopping()")
    world = _current_in_any_view().world
    world.require_not_in_once("rankless.stopping")
    return REQUESTS.ask(world)


def job(
    function: Any = None,
    /,
    *,
    model: Models | None = None,
    optimizer: Optimizers | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    gradient_norm: bool = False,
    check_finite: bool = False,
    view: str | None = None,
    capture: bool = True,
    random: RandomSource = "generator",
    check_synchronized_every: int | None = None,
    zero: ZeroLevel | None = None,
    offload: bool = False,
    recompute: Recompute | None = None,
    plan: PlanSource | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[Callable[Arguments, Result]], Job[Arguments, Result]]:
    """Make a function on whole batches a job: written for one device, run on all devices.

    Calls return the results of the whole batch, the same on every rank. With an `optimizer` the function returns its
    loss: alone, first in a tuple, as "loss" in a dict, or as an attribute `loss`. A call then runs `zero_grad`,
    `backward` and `step`. A per-sample loss is averaged. Without an `optimizer` the job predicts, without
    gradients.

    Args:
        function: Not accepted: `@rankless.job` without parentheses passes it, and raises.
        model: The module, or a list or a dict of all modules that the function uses. Required.
        optimizer: The optimizer, or a list of optimizers that step one after the other. Default: none, the job
            predicts.
        accumulate: Number of calls that make one step, with the gradient of one call on all their samples. A pass over
            a `rankless.loader` ends with a step; without a loader call `Job.flush`. Default: 1.
        clip_norm: Largest norm of the whole gradient over all parameters, as in `clip_grad_norm_`. Default: no limit.
        clip_value: Largest absolute value of a gradient's elements, as in `clip_grad_value_`. Default: no limit.
        gradient_norm: Whether to measure the norm of the whole gradient before clipping, for `Job.gradient_norm`.
            `clip_norm` implies it.
        check_finite: Whether to raise `StepError` instead of stepping if the loss or a gradient is not finite.
        view: "consistent" runs the function on whole batches. "mirrored" runs it as plain PyTorch once per device, on
            that device's element of each list argument, and returns the list of all results. Default: "consistent",
            or "mirrored" if an argument is annotated with `PerDevice`.
        capture: Whether the function becomes one program on several workers. With False every worker runs it on the
            whole batch, which is exact but not faster. Use it for shapes that depend on values.
        random: "generator" draws the numbers of PyTorch's generator, whole tensors on every worker. With "counter" each
            worker draws only its own numbers, by another generator, equal on any number of workers.
        check_synchronized_every: Compare models and optimizer state of all ranks, bit by bit, before every so many
            calls. Default: models at the first call and after a change outside jobs; state after a change outside jobs.
        zero: Training state sharded across workers (ZeRO stage 1, 2 or 3): "optimizer" for the state of the optimizer,
            "gradients" for gradients too, "parameters" for parameters too. With the last two the job leaves no `.grad`.
            Default: every worker holds everything.
        offload: Whether the host's memory holds the shards of `zero` instead of the GPU's, and the optimizer steps
            there. The host has more memory, but steps are slower. On the CPU it changes nothing. Default: no.
        recompute: Blocks whose forward pass is computed again for gradients, to save memory: "blocks" for all repeated
            blocks of the model, such as the layers of a Transformer, or a number above 0 and at most 1
            for the first blocks, with this fraction of the memory of all. Random numbers stay the same. Default:
            only the functions that `torch.utils.checkpoint` wraps in the model.
        plan: How Rankless shards the model along the axes of `rankless run --mesh`: a `rankless.Plan`, or a function
            that returns one, called with the models of the job. Default: Rankless chooses.
        batch_dims: The batch dim of arguments by name, None for an argument without one. It affects speed, not
            results. Default: dim 0 of every tensor.
        dtype: Floating-point dtype of placeholders without a dtype, and of tensors that the function creates without
            one. Default: torch's default dtype.

    Returns:
        A decorator that makes a `rankless.Job` of a function.

    Raises:
        ConfigError: An argument is invalid, `model` is missing, or arguments contradict each other.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @rankless.job(model=model, optimizer=optimizer)
        ... def train(inputs, targets):
        ...     return torch.nn.functional.mse_loss(model(inputs), targets)
        >>> loss = train(torch.ones(4, 3), torch.zeros(4, 1))
        >>> loss.shape
        torch.Size([])
    """
    modules = _require_model(function, model)
    step_options = StepOptions(
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_value,
        gradient_norm=gradient_norm,
        check_finite=check_finite,
        check_synchronized_every=check_synchronized_every,
        zero=zero,
        offload=offload,
    )

    def decorate(function: Callable[Arguments, Result]) -> Job[Arguments, Result]:
        made = make_job(
            function,
            model=modules,
            optimizer=optimizer,
            view=_choose_view(view, capture),
            world=_world,
            step_options=step_options,
        )
        return made.configure(batch_dims or {}, dtype, random, recompute, plan)

    return decorate


def _choose_view(view: str | None, capture: bool) -> str | None:
    """Return the view of a job with these arguments of `job`. Raises `ConfigError` if they contradict each other."""
    if view == "whole":
        raise ConfigError(expected='view="consistent" or "mirrored"', found='view="whole"', fix="pass capture=False")
    if capture is True:
        return view
    if capture is not False or view == "mirrored":
        raise ConfigError(
            expected="capture=True, or capture=False on a job in the consistent view",
            found=f"capture={capture!r}"
            + (' with view="mirrored", which captures nothing' if view == "mirrored" else ""),
            fix="omit capture=",
        )
    return "whole"


def deferred() -> DeferredBuild:
    """Return a context in which models are built without memory for their values.

    The values are those that the same code draws without it. The first call of a job that has the model computes them,
    one tensor after the other, and so do `rankless.save` and `rankless.load`. Parameters stay the same objects.
    A tensor goes to the device on which the code would have made it.

    Returns:
        The context. Its method `materialize(model)` computes the values of a model, for code that uses it outside jobs.

    Raises:
        DeferredError: Code in the block, or after it, needs values that are not there, as a forward pass does.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with rankless.deferred() as build:
        ...     model = torch.nn.Linear(3, 1)
        >>> model.weight
        DeferredTensor((1, 3), dtype=torch.float32, device='cpu')
        >>> build.materialize(model)
        >>> model.weight.shape
        torch.Size([1, 3])
    """
    return DeferredBuild()


def local(value: Any) -> Any:
    """Wrap an argument of a job in the mirrored view that is this device's own element.

    The other ranks pass theirs. A plain list holds the elements of all devices instead.

    Args:
        value: This device's element, for example a tensor of shape (local_batch, ...).

    Returns:
        A wrapper to pass to the job.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> @rankless.job(model=model, view="mirrored")
        ... def predict(inputs):
        ...     return model(inputs)
        >>> [result.shape for result in predict(rankless.local(torch.ones(4, 3)))]
        [torch.Size([4, 1])]
    """
    return LocalArgument(value)


def loader(
    dataset: Any,
    batch_size: int | None = 1,
    shuffle: bool | None = False,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    generator: torch.Generator | None = None,
    *,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    seed: int | None = None,
    device: str | torch.device | None = None,
    reading: Reading = "auto",
) -> Loader[Any]:
    """Make an iterable of whole batches, in exactly the order of a one-process `DataLoader`.

    The arguments up to `persistent_workers` are those of `torch.utils.data.DataLoader`, with the same positions and
    defaults. On several ranks a batch holds logical tensors, of which each rank keeps its rows only.

    Args:
        dataset: A map-style data set (`__getitem__` and `__len__`) or an `IterableDataset`.
        batch_size: Number of samples in a whole batch, over all ranks. None: the data set gives whole batches.
        shuffle: Whether to shuffle anew in every pass.
        sampler: An iterable of indices. It excludes `shuffle`.
        batch_sampler: An iterable of lists of indices. It excludes `batch_size`, `shuffle`, `sampler`, `drop_last`.
        num_workers: Number of data loading processes per rank.
        collate_fn: Makes a batch of a list of samples. Default: PyTorch's `default_collate`.
        pin_memory: Whether to copy batches to page-locked memory.
        drop_last: Whether to drop the last batch if it is not full.
        timeout: How long to wait for a batch of a data loading process, in seconds; 0 waits for ever. The name is
            `DataLoader`'s.
        worker_init_fn: Called in each data loading process with its number.
        multiprocessing_context: How to start the data loading processes.
        generator: The random number generator of the order. It excludes `seed`.
        prefetch_factor: Number of batches that each data loading process prepares ahead. Default: PyTorch's.
        persistent_workers: Whether the data loading processes stay between passes.
        seed: Seed of the order, as of a `generator` with this seed. Default: torch's default generator.
        device: Where to put batches; batches for a GPU are copied ahead. Default: where they were read.
        reading: "auto": as "split", but all samples on every rank if a probe of the first batch shows that the
            `collate_fn` pads, mixes, sorts or draws random numbers. "split": each rank reads its own samples.
            "replicated": each rank reads all samples, with the random numbers of a plain `DataLoader`, and keeps its
            own. "first": rank 0 reads all and sends each rank its own.

    Returns:
        A `rankless.Loader`. Each pass over it is one epoch.

    Raises:
        DataError: An argument is invalid, or arguments contradict each other. Iterating raises it for samples that
            cannot be read.

    Example:
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(5))
        >>> [batch.tolist() for (batch,) in rankless.loader(dataset, 2)]
        [[0, 1], [2, 3], [4]]
    """
    options = LoaderOptions(
        batch_size=batch_size,
        shuffle=bool(shuffle),
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
    view = find_view()
    if view is None:
        return Loader(dataset, options=options, world=_world)
    finish = functools.partial(shard_loaded, view=view)
    return Loader(dataset, options=options, world=lambda: _current_in_any_view().world, finish=finish)


def logical(*, zero: ZeroLevel | None = None) -> None:
    """Let several workers run the script as one training: it sees one process, and its batches are divided.

    Call it at the top of a script of an ordinary loop, without jobs. `rankless run` reads the call in the source, and
    starts the script in the logical view. A late call therefore acts like an early one. On one process, and if it is
    called again, it does nothing.

    Args:
        zero: The training state to shard across the workers too, as `rankless run --zero` does: "optimizer" for the
            optimizers' state, "gradients" also for gradients between backward and step. Default: what the command line
            says, else none.

    Raises:
        ConfigError: Several workers run the script, and not in the logical view: `--separate` was given, or the mesh
            has other axes than `data`, or another launcher has started them. Or the logical view cannot shard what
            `zero` names, or the command line names something else.

    Example:
        >>> rankless.logical()
    """
    importlib.import_module("torch")  # the view begins when the script imports it, which it may not have done yet
    size, view = _current_in_any_view().world.workers.size, find_view()
    level = None if zero is None else read_zero(zero)
    if size > 1 and view is None:
        raise ConfigError(
            expected="a script that runs in the logical view, for which it asks",
            found=f"{size} workers, each of which runs a copy of it",
            fix="start it with `rankless run --logical`, which divides its batches between the workers",
        ).add_location(caller_line())
    if view is None or level is None:
        return
    if view.zero not in (None, level):
        raise ConfigError(
            expected=f'rankless.logical(zero="{view.zero}"), as on the command line',
            found=f'zero="{level}"',
            fix="omit one of them",
        ).add_location(caller_line())
    view.zero = level


def shard_batch(batch: Batch) -> Batch:
    """Divide a batch that the script has made without a loader between the workers.

    In the logical view of `rankless run` each worker then computes its own rows, and all results are those of the whole
    batch. Call it on every worker, with equal values.

    Args:
        batch: A tensor, or lists, tuples, dicts and named tuples of tensors and anything else. Tensors are divided
            along dim 0. Those of another length than most stay whole, and so does a batch of fewer rows than workers.

    Returns:
        The batch with tensors that look whole; elsewhere than in the logical view the batch itself.

    Raises:
        RanksDiverged: Workers have other values.

    Example:
        >>> inputs, targets = rankless.shard_batch((torch.ones(8, 3), torch.ones(8)))
        >>> inputs.shape
        torch.Size([8, 3])
    """
    view = find_view()
    if view is None:
        return batch
    divided: Batch = shard_whole(batch, view)
    return divided


def save(
    path: str | os.PathLike[str],
    *,
    layout: checkpoint.Layout = "whole",
    background: bool = False,
    extra: Any = None,
    **objects: Any,
) -> None:
    """Write the state of objects and of all random number generators to the folder `path`.

    Call it on every rank. A checkpoint that exists at `path` is replaced at once: after a crash at any point, `path`
    holds the old checkpoint or the new one.

    Args:
        path: The folder of the checkpoint.
        layout: "whole": rank 0 writes one file, and all ranks gather sharded states for it, one tensor at a time.
            "sharded": each rank writes a file, with its own shards of sharded states, about the same number of bytes.
        background: Whether to copy the state, return, and write in a thread. The next save or load and the end of the
            script wait for it, and raise its error. With "whole", sharded states are written before.
        extra: Plain data that `load` returns: numbers, text, lists, dicts, tensors.
        **objects: What to save, by name: modules, optimizers, schedulers, loaders, anything with a `state_dict`.

    Raises:
        CheckpointError: The state cannot be saved, the ranks' arguments differ, or the disk is full. Every rank raises.
        RanklessError: The call is inside `rankless.once`.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> rankless.save("checkpoint", model=model, extra={"epoch": 1})
        >>> rankless.load("checkpoint", model=model)
        {'epoch': 1}
    """
    options = checkpoint.SaveOptions(layout=layout, background=background, extra=extra)
    _find_saver("rankless.save").save(path, objects, options=options)


def load(path: str | os.PathLike[str], *, strict: bool = True, random: bool = True, **objects: Any) -> Any:
    """Restore the state of objects from the folder `path`, and return the checkpoint's `extra`.

    Call it on every rank. The number of ranks, and the `zero=` of jobs, may differ from those of the save. Each rank
    reads its shards of sharded states. Jobs whose optimizers are among the objects shard their states first, as their
    first call would. Either all objects are restored or none.

    Args:
        path: The folder of the checkpoint.
        strict: Whether everything must fit. If False, modules take the tensors that fit, objects that were not saved
            stay as they are, dtypes are converted, and a warning lists the tensors that were left out.
        random: Whether to restore the random number generators too.
        **objects: What to restore, under the names of the save. Other objects of the checkpoint are ignored.

    Returns:
        The `extra` of the save; None if there was none.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it does not fit the objects. Every rank raises.
        ConfigError: A job with `zero=` cannot shard its states.
        RanklessError: The call is inside `rankless.once`.

    Example:
        >>> model, copy = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> rankless.save("checkpoint", model=model)
        >>> rankless.load("checkpoint", model=copy)
        >>> torch.equal(model.weight, copy.weight)
        True
    """
    saver = _find_saver("rankless.load")
    saver.wait()

    def restore() -> checkpoint.Loaded:
        divide_states_of_jobs(objects.values())
        return checkpoint.load(path, objects, mesh=saver.mesh, owner=saver.owner, strict=strict, random=random)

    loaded = saver.run_for_all(restore)
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
    autosave: bool | Callable[[], int] = False,
) -> checkpoint.Checkpoints:
    """Manage the checkpoints of a training run in `folder`: save by step, keep the last and the best, resume.

    Call it on every rank.

    Args:
        folder: The folder of all checkpoints of the run. Each is in `FOLDER/step-STEP`.
        keep_last: How many of the latest checkpoints to keep. Default: all of them.
        keep_best: How many checkpoints of the best metric to keep besides. Default: 0.
        mode: Whether the best metric is the smallest ("min", as for a loss) or the largest ("max").
        layout: As in `rankless.save`.
        background: As in `rankless.save`.
        autosave: Whether to save the objects of the last `load` or `save`, and end with exit code 75, when the run is
            asked to stop. Steps are batches of the one `rankless.loader` among them, or what a function returns.

    Returns:
        A `Checkpoints` object with `save`, `load`, `wait`, `latest`, `best` and `steps`.

    Raises:
        CheckpointError: `keep_last`, `keep_best`, `mode` or `autosave` is invalid.
        ConfigError: `autosave` outside of the main thread.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> checkpoints = rankless.checkpoints("run", keep_last=1)
        >>> checkpoints.save(1, model=model)
        >>> checkpoints.save(2, model=model)
        >>> checkpoints.steps
        [2]
    """
    return checkpoint.Checkpoints(
        folder,
        retention=checkpoint.Retention(keep_last=keep_last, keep_best=keep_best, mode=mode),
        options=checkpoint.SaveOptions(layout=layout, background=background),
        run=_RUN_FUNCTIONS,
        autosave=_make_autosave(autosave),
    )


def _report_load(step: int) -> None:
    world = _world()
    world.send_record(CheckpointLoaded(rank=world.numbering.own, time_ns=time.monotonic_ns(), step=step))


_RUN_FUNCTIONS = checkpoint.RunFunctions(
    find_saver=lambda: _find_saver("a method of rankless.checkpoints"),
    notify=lambda text: _world().notify(text),
    prepare_load=divide_states_of_jobs,
    report_load=_report_load,
)


def _make_autosave(wanted: bool | Callable[[], int]) -> checkpoint.Autosave | None:
    if wanted is False:
        return None
    REQUESTS.watch(_world())
    return checkpoint.Autosave(
        is_stopping=lambda: REQUESTS.ask(_world()) and not _world().passes.have_unfinished_calls,
        is_loader=lambda each: isinstance(each, Loader),
        count=None if wanted is True else wanted,
    )


def _world() -> World:
    return _current().world


def _current() -> ProcessContext:
    """Return the context of this process. Raises `ConfigError` in the logical view, in which there are no ranks."""
    require_ranks(OF_RANKS)
    return _current_in_any_view()


def _current_in_any_view() -> ProcessContext:
    return current_context(make_observer=_make_display_observer)


def _find_saver(operation: str) -> checkpoint.Saver:
    """Return what saves in this process. Raises RanklessError inside `rankless.once`."""
    context = _current()
    context.world.require_not_in_once(operation)
    context.world.joint.meet(operation)
    return context.saver


def _make_display_observer() -> RecordObserver:
    """Return an observer that shows progress and notices, for a script that runs without an agent."""
    display = ProgressDisplay()
    atexit.register(display.close)

    def show(record: AnyRecord) -> None:
        if isinstance(record, Progress):
            display.show(record)
        elif isinstance(record, Notice):
            with display.hidden():
                print(f"rankless: {record.text}", file=sys.stderr)

    return show


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _require_model(function: object, model: Models | None) -> Models:
    """Return the models of a job. Raises `ConfigError` for `@rankless.job` without parentheses, or without models."""
    if function is None and model is not None:
        return model
    code = getattr(function, "__code__", None)
    found = f"{type(function).__name__} without a name, or @rankless.job without parentheses"
    raise ConfigError(
        expected="@rankless.job(model=model), with the modules that the function uses",
        found="no model=" if function is None else found,
        fix="write @rankless.job(model=model), or @rankless.job(model=model, optimizer=optimizer) to train",
        where=None if code is None else f"{display_name(code.co_filename)}:{code.co_firstlineno}",
    )
