"""A plain script: descriptors, folders, and files in threads, processes and data sets, as `file_cases`."""

import concurrent.futures
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import numpy as np
import torch


def in_a_thread():
    def work():
        Path("thread.txt").write_text("from a thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return Path("thread.txt").exists()


def write_in_child(number):
    os.makedirs(f"child{number}")
    Path(f"child{number}", "a.txt").write_text(str(number))
    os.rename(f"child{number}/a.txt", f"child{number}/b.txt")
    return number


def in_processes():
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        found = pool.map(write_in_child, range(4))
    read = [Path(f"child{number}", "b.txt").read_text() for number in found]
    process = context.Process(target=write_in_child, args=(7,))
    process.start()
    process.join()
    return read, sorted(os.listdir()), os.path.exists("child7/b.txt"), process.exitcode


def in_many_threads():
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(write_in_child, range(5)))
        one = pool.submit(write_in_child, 9).result()
    return found, one, sorted(os.listdir()), Path("child9/b.txt").read_text()


class Cached(torch.utils.data.Dataset):
    """A data set that keeps what it has computed in files, and counts its calls in one."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        path = Path(f"{index}.npy")
        if not path.exists():
            np.save(path, np.full(2, index * 1.5))
        with open("calls.log", "a") as file:
            file.write(f"{index}\n")
        return torch.from_numpy(np.load(path))


def cached_data_set():
    loader = torch.utils.data.DataLoader(Cached(), batch_size=4)
    found = [batch.sum().item() for _ in range(2) for batch in loader]
    return found, Path("calls.log").read_text().split(), sorted(os.listdir())


def reader_processes():
    Path("given.txt").write_text("3.5")
    loader = torch.utils.data.DataLoader(Reading(), batch_size=2, num_workers=2)
    return [batch.sum().item() for batch in loader]


class Reading(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor(float(Path("given.txt").read_text()) * index)


def redirected_descriptor():
    before = os.dup(1)
    with open("fd.txt", "w") as file:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.write(1, b"to the file")
        os.dup2(before, 1)
    os.close(before)
    return Path("fd.txt").read_text()


def deleted_bottom_up():
    for name in ("a/b/c", "a/d"):
        os.makedirs(name)
        Path(name, "f").touch()
    for base, folders, files in os.walk("a", topdown=False):
        for name in files:
            os.remove(os.path.join(base, name))
        for name in folders:
            os.rmdir(os.path.join(base, name))
    return os.listdir("a")


def modes_of_files():
    Path("m.sh").write_text("#!/bin/sh\n")
    os.chmod("m.sh", 0o750)
    os.truncate("m.sh", 4)
    os.utime("m.sh", (1000, 2000))
    os.link("m.sh", "hard.sh")
    return (
        oct(os.stat("m.sh").st_mode),
        os.path.getmtime("m.sh"),
        os.stat("hard.sh").st_nlink,
        os.access("m.sh", os.X_OK),
    )


CASES = [
    redirected_descriptor,
    deleted_bottom_up,
    modes_of_files,
    in_a_thread,
    in_processes,
    in_many_threads,
    cached_data_set,
    reader_processes,
]

if __name__ == "__main__":
    base = os.getcwd()
    wanted = sys.argv[1:]
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        os.makedirs(case.__name__)
        os.chdir(case.__name__)
        try:
            result = case()
        finally:
            os.chdir(base)
        print(case.__name__, repr(result))
        with open(os.path.join(case.__name__, "result.txt"), "w") as file:
            file.write(repr(result))
