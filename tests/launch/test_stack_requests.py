"""The watchdog asks workers for their stacks, which must never disturb them, whatever their threads do."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.jobs import wait_until

from rankless.launch.watchdog import stacks
from rankless.launch.watchdog.stacks import Frame, StackRequest, ask_thread, parse_main_stack
from rankless.records.shared_record import read_record
from rankless.records.worker_status import (
    PAGE_BYTES,
    PLACE_BYTES,
    PLACE_REQUEST,
    PLACE_START,
    STACKS_REQUEST,
    open_page,
    read_page,
)

WORKER = """
import os, sys, threading, time
from rankless.runtime.status_and_stack_writer import publish_status

publish_status(int(sys.argv[1]), main_thread=threading.get_ident())

def dive(depth):
    return dive(depth - 1) if depth else len(str(object()))

def work():
    while True:
        dive(200)

def run_threads(count):
    for _ in range(count):
        threading.Thread(target=work, daemon=True).start()

def wait():
    print(threading.active_count(), flush=True)
    sys.stdin.read()

"""


@pytest.fixture
def start():
    """Return a function that starts a process with a page, and returns the page and the process once it prints."""
    started = []

    def start(code):
        page = open_page()
        os.set_inheritable(page, True)
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER + code, str(page)],
            close_fds=False,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append((page, process))
        printed = process.stdout.readline()
        assert printed, "the process has ended"
        return page, process, printed.strip()

    yield start
    for page, process in started:
        process.kill()
        process.communicate()
        os.close(page)


def ask(process_id, page, *children):
    request = StackRequest(process_id, page, time.monotonic())
    request.add(children, time.monotonic())
    wait_until(lambda: request.is_complete(time.monotonic()))
    return request.stacks


@pytest.mark.parametrize("main", ["wait()", "print(1, flush=True); work()"], ids=["waits", "runs"])
def test_threads_that_run_survive_requests(start, main):
    page, process, _ = start(f"run_threads(2)\n{main}")
    for _ in range(100):
        text = ask(process.pid, page)[process.pid]
        assert text.startswith(f"Process {process.pid}\n")
        assert text.count("Thread 0x") == 3
        assert parse_main_stack(text, read_page(page).main_thread)[-1].function in ("<module>", "work", "dive")
    assert process.poll() is None


@pytest.mark.parametrize("main", ["work()", "while True: mmap.mmap(-1, 1 << 16).close()"], ids=["Python", "kernel"])
def test_a_main_thread_that_runs_never_gets_the_signal(start, monkeypatch, main):
    monkeypatch.setattr(stacks, "RESPONSE_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(StackRequest, "_ask_thread", lambda *_: False)
    monkeypatch.setattr(stacks.os, "kill", lambda *_: pytest.fail("the signal might kill it"))
    page, process, _ = start(f"import mmap\nprint(1, flush=True)\n{main}")
    request = StackRequest(process.pid, page, time.monotonic())
    request.add([process.pid], time.monotonic())
    wait_until(lambda: request.is_complete(time.monotonic()))
    assert request.stacks == {}
    assert process.poll() is None


def test_a_stack_is_that_of_the_main_thread_with_its_lines(start):
    page, process, count = start("wait()")
    assert count == "1", "scripts do not see the thread that writes"
    frames = parse_main_stack(ask(process.pid, page)[process.pid], read_page(page).main_thread)
    assert [frame.function for frame in frames] == ["wait", "<module>"]
    assert frames[-1] == Frame("<string>", (WORKER + "wait()").count("\n") + 1, "<module>")


def test_deep_stacks_are_cut_at_the_outer_end(start):
    page, process, _ = start("sys.setrecursionlimit(10000)\ndef deep(n): deep(n - 1) if n else wait()\ndeep(5000)")
    text = ask(process.pid, page)[process.pid]
    frames = parse_main_stack(text, read_page(page).main_thread)
    assert [frame.function for frame in frames[:2]] == ["wait", "deep"]
    assert len(frames) == 100
    assert "  ...\n" in text


def test_a_library_that_keeps_the_lock_is_named_through_the_signal(start, monkeypatch):
    monkeypatch.setattr(stacks, "RESPONSE_TIMEOUT_SECONDS", 0.3)
    loop = "while True: library.pause()"  # a signal ends a pause
    page, process, _ = start(
        f"import ctypes\nlibrary = ctypes.PyDLL(None)\ndef hang():\n    print(1, flush=True)\n    {loop}\nhang()"
    )
    frames = parse_main_stack(ask(process.pid, page)[process.pid], read_page(page).main_thread)
    assert [frame.function for frame in frames] == ["hang", "<module>"]


def test_a_forked_child_answers_by_the_signal(start):
    page, process, child = start(
        "child = os.fork()\nif not child: time.sleep(100)\nelse:\n    print(child, flush=True)\n    sys.stdin.read()"
    )
    try:
        found = ask(process.pid, page, int(child))
        assert set(found) == {process.pid, int(child)}
        assert not found[int(child)].startswith("Process")
        assert "in <module>" in found[int(child)]
        assert parse_main_stack(found[int(child)], 0)[0].function == "<module>"
    finally:
        os.kill(int(child), 9)


def test_a_late_answer_is_not_that_of_a_child(start, monkeypatch):
    monkeypatch.setattr(StackRequest, "_prepare_signal", lambda *_: True)
    page, process, _ = start("wait()")
    request = StackRequest(process.pid, page, 0.0)
    request._current = process.pid + 1
    wait_until(lambda: os.fstat(page).st_size > PAGE_BYTES)
    assert not request.is_complete(0.1)
    assert not request.is_complete(0.2)
    assert request.stacks == {}


@pytest.mark.parametrize("code", ["os.closerange(3, 100)", "os.closerange(3, 100); os.pipe(); os.pipe(); os.pipe()"])
def test_a_script_that_closes_descriptors_gets_nothing_it_did_not_ask_for(start, code):
    page, process, _ = start(f"wake = threading.Event()\n{code}\nwait()")
    assert ask(process.pid, page) == {}
    assert process.poll() is None


def read_state(thread: int) -> str:
    """Return the state letter that the kernel gives for a thread."""
    with open(f"/proc/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_stopped_process_and_one_that_has_ended_do_not_answer(start, monkeypatch):
    monkeypatch.setattr(stacks, "RESPONSE_TIMEOUT_SECONDS", 0.3)
    page, process, _ = start("wait()")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: {read_state(thread.id) for thread in psutil.Process(process.pid).threads()} == {"T"})
    assert ask(process.pid, page) == {}
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert ask(process.pid, page) == {}


def read_place(page):
    record = read_record(page, offset=PLACE_START, size=PLACE_BYTES)
    return "" if record is None else record.data.decode()


def test_places_and_stacks_are_read_at_once_and_do_not_mix(start, monkeypatch):
    monkeypatch.setattr(StackRequest, "_prepare_signal", lambda *_: pytest.fail("it needs no signal"))
    page, process, _ = start("run_threads(1)\nwait()")
    for _ in range(100):
        request = StackRequest(process.pid, page, time.monotonic())
        for _ in range(3):
            assert ask_thread(process.pid, read_page(page), PLACE_REQUEST)
        wait_until(lambda request=request: request.is_complete(time.monotonic()))
        text, place = request.stacks[process.pid], read_place(page)
        assert text.count("Thread 0x") == 2
        assert text.startswith(f"Process {process.pid}\n")
        assert [frame.function for frame in parse_main_stack(place, read_page(page).main_thread)] == [
            "wait",
            "<module>",
        ]
        assert place.count("Thread 0x") == 1
    assert process.poll() is None


def test_one_read_of_several_requests_answers_both_kinds(start):
    page, process, _ = start("wait()")
    assert ask_thread(process.pid, read_page(page), STACKS_REQUEST + PLACE_REQUEST + PLACE_REQUEST)
    wait_until(lambda: read_place(page) != "" and os.fstat(page).st_size > PAGE_BYTES)


def test_a_place_with_long_names_is_cut_at_the_outer_end(start):
    name = "f" * 1000
    code = f"def {name}(n):\n    {name}(n - 1) if n else wait()\n{name}(90)"
    page, process, _ = start(code)
    assert ask_thread(process.pid, read_page(page), PLACE_REQUEST)
    wait_until(lambda: read_place(page) != "")
    frames = parse_main_stack(read_place(page), read_page(page).main_thread)
    assert [frame.function for frame in frames[:2]] == ["wait", name]
    assert 20 < len(frames) < 30


def test_the_page_has_the_times_of_the_last_steps(start):
    code = "count = publish_status(int(sys.argv[1]), main_thread=0)\nfor _ in range(20): count()\nwait()"
    page, _, _ = start(code)
    status = read_page(page)
    assert (status.count, len(status.step_times)) == (20, 16)
    assert status.step_times[-1] == status.last
    assert list(status.step_times) == sorted(status.step_times)
