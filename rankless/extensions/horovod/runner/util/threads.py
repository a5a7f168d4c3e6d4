"""Threads that call functions: one in the background, one per argument, one after an event."""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `target(*args)`, and return it.

    Args:
        target: The function.
        args: Its arguments.
        name: The thread's name. Default Python's.
        daemon: Whether the program may end before the thread. Default True.
        silent: Whether exceptions of the function are not printed. Default False.

    Raises:
        ValueError: `args` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")

    def call() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                traceback.print_exc()

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `func(*args)` once the event is set, unless `stop` is set before. Return the thread.

    Args:
        event: The event.
        func: The function.
        args: Its arguments.
        stop: Ends the thread without a call.
        check_stop_interval_s: How often to look at `stop`, in seconds. Default 1.
        daemon: Whether the program may end before the thread. Default True.
        silent: Whether exceptions of the function are not printed. Default False.

    Raises:
        ValueError: An event is missing, or `args` is not a tuple.
    """
    if event is None:
        raise ValueError("Event must not be None")

    def wait_and_call() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait_and_call, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call the function with each item's arguments in threads.

    Args:
        fn: The function.
        args_list: The arguments of each call.
        block_until_all_done: Whether to wait for all calls. Default True.
        max_concurrent_executions: The largest number of threads. Default 1000.

    Returns:
        The results by index of the call, without those that raised; None if it does not wait.
    """
    waiting: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for item in enumerate(args_list):
        waiting.put(item)
    results: dict[int, Any] = {}

    def work() -> None:
        while True:
            try:
                index, arguments = waiting.get_nowait()
            except queue.Empty:
                return
            results[index] = fn(*arguments)

    threads = [in_thread(work) for _ in range(min(max_concurrent_executions, len(args_list)))]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    return results
