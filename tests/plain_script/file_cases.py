"""A plain script: what people do with files, each case in a folder of its own. Run by plain Python and by Rankless.

What a case returns is printed, so that it is compared too.
"""

import atexit
import codecs
import contextlib
import csv
import glob
import gzip
import io
import json
import logging
import mmap
import os
import pickle
import shelve
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

early = open("early.txt", "w")  # before torch is imported
early.write("early\n")

import numpy as np  # noqa: E402
import torch  # noqa: E402


def write_and_read():
    with open("a.txt", "w") as file:
        count = file.write("héllo\n")
        place = file.tell()
    return count, place, open("a.txt").read(), os.path.getsize("a.txt")


def append_in_a_loop():
    sizes = []
    for step in range(5):
        with open("log.csv", "a") as file:
            sizes.append((file.tell(), file.write(f"{step},{step * step}\n")))
        sizes.append(os.path.getsize("log.csv"))
    return sizes, open("log.csv").readlines()


def read_and_write():
    Path("b.txt").write_text("0123456789")
    with open("b.txt", "r+") as file:
        first = file.read(3)
        file.seek(5)
        file.write("XY")
        file.seek(0)
        return first, file.read(), file.truncate(8), Path("b.txt").read_text()


def exclusive():
    found = []
    for _ in range(2):
        try:
            with open("only.txt", "x") as file:
                file.write("once")
            found.append("made")
        except FileExistsError as error:
            found.append((error.errno, error.filename, str(error)))
    return found


def two_handles():
    one = open("two.txt", "w")
    one.write("first ")
    one.flush()
    two = open("two.txt", "a")
    two.write("second ")
    two.flush()
    reader = open("two.txt")
    seen = [reader.read()]
    one.write("third")
    one.flush()
    seen += [reader.read(), os.path.getsize("two.txt"), one.tell()]
    for file in (one, two, reader):
        file.close()
    return seen, open("two.txt").read()


def read_while_open():
    with open("open.txt", "w", buffering=1) as file:
        seen = []
        for number in range(3):
            print(number, file=file)
            seen.append(Path("open.txt").read_text())
        file.write("tail")
        seen.append(Path("open.txt").read_text())
    return seen, Path("open.txt").read_text()


def tail_a_log():
    with open("tail.log", "w") as writer, open("tail.log") as reader:
        lines = []
        for number in range(4):
            writer.write(f"line {number}\n")
            writer.flush()
            lines.append(reader.readline())
        return lines


def reader_first():
    Path("r.txt").write_text("old text\n")
    seen = []
    with open("r.txt") as reader:
        seen.append(reader.read(3))
        with open("r.txt", "a") as writer:
            writer.write("new\n")
            writer.flush()
            seen.append(reader.read())
            writer.write("newer\n")
        seen.append(reader.read())
    with open("r.txt", "rb") as reader:
        seen.append(reader.read(2))
        Path("r.txt").write_text("replaced by a longer text")
        reader.seek(0)
        seen.append(reader.read())
    return seen, Path("r.txt").read_text()


def other_functions():
    with gzip.open("g.gz", "wt") as file:
        file.write("zipped")
    with codecs.open("c.txt", "w", "latin-1") as coded:
        coded.write("\xe9")
    with zipfile.ZipFile("z.zip", "w") as file:
        file.writestr(zipfile.ZipInfo("one"), "1")
    with zipfile.ZipFile("z.zip", "a") as file:
        file.writestr(zipfile.ZipInfo("two"), "2")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        Path(folder, "x").write_text("x")
        inside = os.listdir(folder)
    found = gzip.open("g.gz", "rt").read(), zipfile.ZipFile("z.zip").namelist(), inside, sorted(os.listdir())
    os.remove("g.gz")  # it has a time
    return found


def atomic_save():
    for number in range(3):
        torch.save({"step": number}, "model.tmp")
        os.replace("model.tmp", "model.pt")
    return torch.load("model.pt"), sorted(os.listdir())


def atomic_save_with_a_temporary_file():
    for number in range(3):
        with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
            torch.save(torch.full((2,), number), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, "model.pt")
    return torch.load("model.pt").tolist(), sorted(os.listdir())


def temporary_file_moved():
    handle, name = tempfile.mkstemp()
    with os.fdopen(handle, "w") as file:
        file.write("moved")
    shutil.move(name, "target.txt")
    return os.path.exists(name), Path("target.txt").read_text()


def temporary_folder():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.txt")
        path.write_text("x")
        shutil.copy(path, "copied.txt")
        found = sorted(os.listdir(folder)), path.read_text()
    return found, os.path.exists(folder), Path("copied.txt").read_text()


def spooled():
    with tempfile.SpooledTemporaryFile(max_size=4) as file:
        file.write(b"0123456789")
        file.seek(2)
        return file.read()


def rotate_checkpoints():
    kept = []
    for step in range(6):
        path = f"step{step}.pt"
        torch.save(torch.ones(step), path)
        kept.append(path)
        if len(kept) > 2:
            os.remove(kept.pop(0))
    return sorted(glob.glob("*.pt")), max(glob.glob("*.pt"), key=os.path.getmtime)


def resume_if_exists():
    found = []
    for _ in range(3):
        start = torch.load("last.pt")["epoch"] + 1 if os.path.exists("last.pt") else 0
        torch.save({"epoch": start}, "last.pt")
        found.append(start)
    return found


def header_if_new():
    for epoch in range(3):
        is_new = not os.path.isfile("table.csv")
        with open("table.csv", "a", newline="") as file:
            writer = csv.DictWriter(file, ["epoch", "loss"])
            if is_new:
                writer.writeheader()
            writer.writerow({"epoch": epoch, "loss": 1 / (epoch + 1)})
    return list(csv.DictReader(open("table.csv")))


def logging_handlers():
    logger = logging.getLogger("case")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler("train.log", delay=True)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    for epoch in range(3):
        logger.info("epoch %d", epoch)
    handler.close()
    logger.removeHandler(handler)
    return Path("train.log").read_text()


def rotating_log():
    from logging.handlers import RotatingFileHandler

    logger = logging.getLogger("rotating")
    handler = RotatingFileHandler("r.log", maxBytes=40, backupCount=2)
    logger.addHandler(handler)
    for epoch in range(9):
        logger.warning("epoch number %d", epoch)
    handler.close()
    logger.removeHandler(handler)
    return sorted(os.listdir()), Path("r.log").read_text()


def json_per_epoch():
    history = []
    for epoch in range(3):
        history.append({"epoch": epoch})
        with open("history.json", "w") as file:
            json.dump(history, file, indent=2)
        history = json.load(open("history.json"))
    return history


def pickle_and_numpy():
    with open("p.pkl", "wb") as file:
        pickle.dump({"a": np.arange(3)}, file)
    np.save("a.npy", np.arange(6).reshape(2, 3))
    np.savez("b.npz", x=np.ones(2), y=np.zeros(3))
    np.savetxt("c.txt", np.eye(2))
    np.arange(4, dtype=np.int32).tofile("d.bin")
    loaded = np.load("b.npz")
    return (
        pickle.load(open("p.pkl", "rb"))["a"].tolist(),
        np.load("a.npy").tolist(),
        {key: loaded[key].tolist() for key in loaded},
        np.loadtxt("c.txt").tolist(),
        np.fromfile("d.bin", np.int32).tolist(),
    )


def numpy_to_an_open_file():
    with open("two.npy", "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
        place = file.tell()
    with open("two.npy", "rb") as file:
        return place, np.load(file).tolist(), np.load(file).tolist()


def memory_map():
    array = np.memmap("m.bin", dtype=np.float32, mode="w+", shape=(4,))
    array[:] = [1, 2, 3, 4]
    array.flush()
    total = float(array.sum())
    del array
    return total, np.memmap("m.bin", dtype=np.float32, mode="r").tolist(), os.path.getsize("m.bin")


def mapped_bytes():
    Path("mm.bin").write_bytes(b"0123456789")
    with open("mm.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[2:4] = b"XY"
        return bytes(memory[:6])


def paths():
    folder = Path("deep/er")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t").touch()
    (folder / "t").touch()
    (folder / "b").write_bytes(b"12")
    (folder / "b").rename(folder / "c")
    (folder / "link").symlink_to("c")
    found = sorted(str(path) for path in Path().rglob("*"))
    (folder / "link").unlink()
    (folder / "t").unlink(missing_ok=True)
    (folder / "t").unlink(missing_ok=True)
    return found, (folder / "c").read_bytes(), (folder / "c").stat().st_size, folder.exists()


def trees():
    for name in ("x/1", "x/2/3"):
        os.makedirs(name)
        Path(name, "f.txt").write_text(name)
    shutil.copytree("x", "y")
    shutil.move("x/1", "z")
    shutil.rmtree("x")
    copied = shutil.copy2("y/2/3/f.txt", "copy.txt")
    return copied, sorted(str(path) for path in Path().rglob("*")), os.path.exists("x")


def clean_start():
    for _ in range(2):
        if os.path.exists("runs"):
            shutil.rmtree("runs")
        os.makedirs("runs")
        Path("runs", "f").write_text("f")
    return [(base, sorted(dirs), sorted(files)) for base, dirs, files in os.walk(".")]


def next_run_number():
    os.makedirs("runs", exist_ok=True)
    made = []
    for _ in range(3):
        number = len(os.listdir("runs"))
        os.mkdir(f"runs/{number}")
        made.append(number)
    return made


def archives():
    Path("one.txt").write_text("one")
    with zipfile.ZipFile("a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write("one.txt")
        file.writestr(zipfile.ZipInfo("two.txt"), "two")
    with tarfile.open("b.tar", "w") as file:
        file.add("one.txt")
    zipfile.ZipFile("a.zip").extractall("unzipped")
    tarfile.open("b.tar").extractall("untarred")
    shutil.make_archive("c", "zip", "unzipped")
    shutil.unpack_archive("c.zip", "d")
    names = sorted(os.listdir("unzipped")), sorted(os.listdir("untarred")), sorted(os.listdir("d"))
    for name in ("a.zip", "b.tar", "c.zip"):  # they have the times of their members
        os.remove(name)
    return names


def change_folder():
    os.mkdir("sub")
    os.chdir("sub")
    Path("in_sub.txt").write_text("1")
    os.chdir("..")
    Path("in_base.txt").write_text("2")
    return os.path.isfile("sub/in_sub.txt"), Path("sub", "in_sub.txt").read_text()


def torch_files():
    buffer = io.BytesIO()
    torch.save([1, 2], buffer)
    with open("f.pt", "wb") as file:
        torch.save(torch.arange(3), file)
        torch.save(torch.arange(2), file)
    with open("g.pt", "wb") as file:
        file.write(buffer.getvalue())
    torch.save(torch.ones(2), Path("h.pt"), _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), "j.pt")
    torch.save(torch.ones(3), "m.pt")
    mapped = torch.load("m.pt", mmap=True).tolist()
    loaded = torch.load("g.pt"), torch.load("h.pt").tolist(), torch.jit.load("j.pt")(torch.tensor([-1.0])).tolist()
    os.remove("h.pt")  # this format has addresses
    os.remove("j.pt")  # this one has the path of the code that made it
    return mapped, loaded


def torch_save_fails():
    found = []
    for target, value in (("no/where.pt", 1), ("lambda.pt", lambda: 1), (".", 1)):
        try:
            torch.save(value, target)
        except Exception as error:
            found.append(type(error).__name__)
    return found, torch.save(torch.ones(1), "good.pt"), torch.load("good.pt").tolist()


def errors():
    found = []
    os.mkdir("folder")
    for attempt in (
        lambda: open("missing/file", "w"),
        lambda: open("folder", "w"),
        lambda: open("missing"),
        lambda: open("missing", "r+"),
        lambda: os.remove("missing"),
        lambda: os.mkdir("folder"),
        lambda: os.rename("missing", "other"),
        lambda: os.rmdir("missing"),
        lambda: shutil.rmtree("missing"),
        lambda: shutil.copy("missing", "other"),
        lambda: open("bad", "rw"),
        lambda: open("bad", "wb", encoding="utf-8"),
        lambda: open("bad", "w", buffering=0),
        lambda: open(3.5, "w"),
        lambda: open("bad\0", "w"),
    ):
        try:
            attempt()
        except (OSError, ValueError, TypeError) as error:
            found.append((type(error).__name__, str(error), getattr(error, "filename", None)))
    return found, sorted(os.listdir())


def exception_inside():
    try:
        with open("partial.txt", "w") as file:
            file.write("before")
            raise KeyError("inside")
    except KeyError:
        return Path("partial.txt").read_text(), file.closed


def descriptors():
    number = os.open("raw.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    written = os.write(number, b"abcdef")
    os.lseek(number, 2, os.SEEK_SET)
    os.write(number, b"XX")
    size = os.fstat(number).st_size
    os.close(number)
    found = []
    for _ in range(2):
        try:
            os.close(os.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            found.append("locked")
        except FileExistsError:
            found.append("busy")
    return written, size, Path("raw.bin").read_bytes(), found


def redirected_output():
    with open("out.txt", "w") as file, contextlib.redirect_stdout(file):
        print("captured")
    before, sys.stdout = sys.stdout, open("stdout.txt", "w")
    print("replaced")
    sys.stdout.close()
    sys.stdout = before
    print("printed", file=open("printed.txt", "w"))
    return [Path(name).read_text() for name in ("out.txt", "stdout.txt", "printed.txt")]


def positions():
    with open("seek.bin", "wb") as file:
        file.write(b"0123456789")
        places = [file.tell(), file.seek(3), file.write(b"ab"), file.tell(), file.seek(0, os.SEEK_END)]
        places += [
            file.truncate(20),
            file.tell(),
            file.seekable(),
            file.readable(),
            file.writable(),
            file.name,
            file.mode,
        ]
    with open("text.txt", "w", encoding="utf-16", newline="\r\n") as text:
        text.write("a\nb\n")
        places += [text.tell(), text.encoding, text.name, text.mode]
    return places, Path("seek.bin").read_bytes(), Path("text.txt").read_bytes()


def large_file():
    with open("large.bin", "wb") as file:
        for _ in range(40):
            file.write(b"x" * 100_000)
    return os.path.getsize("large.bin"), len(Path("large.bin").read_bytes())


def database():
    with contextlib.closing(sqlite3.connect("d.db")) as connection, connection:
        connection.execute("create table t (epoch integer, loss real)")
        for epoch in range(3):
            connection.execute("insert into t values (?, ?)", (epoch, epoch / 2))
    with contextlib.closing(sqlite3.connect("d.db")) as connection:
        return connection.execute("select * from t").fetchall()


def shelf():
    with shelve.open("shelf") as file:
        file["a"] = [1, 2]
    with shelve.open("shelf") as file:
        found = dict(file)
    for path in glob.glob("shelf*"):
        os.remove(path)
    return found


def overwrite():
    seen = []
    for number in range(4):
        Path("same.txt").write_text("x" * (10 - number))
        seen.append(Path("same.txt").read_text())
    return seen


def not_closed():
    file = open("leak.txt", "w")
    file.write("leaked")
    del file
    return Path("leak.txt").read_text()


def device_and_descriptor():
    with open(os.devnull, "w") as file:
        file.write("nothing")
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        file.write("piped")
    with os.fdopen(read) as file:
        return file.read()


def unlink_while_open():
    with open("gone.txt", "w+") as file:
        file.write("still here")
        os.unlink("gone.txt")
        file.seek(0)
        return file.read(), os.path.exists("gone.txt")


def rename_while_open():
    with open("old.txt", "w") as file:
        file.write("one ")
        os.rename("old.txt", "new.txt")
        file.write("two")
    return Path("new.txt").read_text(), os.path.exists("old.txt")


def count_lines_then_append():
    for _ in range(3):
        with open("count.txt", "a+") as file:
            file.seek(0)
            lines = len(file.readlines())
            file.write(f"{lines}\n")
    return Path("count.txt").read_text()


def at_exit(folder):
    with open(os.path.join(folder, "exit.txt"), "w") as file:
        file.write("end")
    os.rename(os.path.join(folder, "exit.txt"), os.path.join(folder, "ended.txt"))


def write_at_exit():
    atexit.register(at_exit, os.getcwd())


CASES = [
    reader_first, other_functions,
    write_and_read, append_in_a_loop, read_and_write, exclusive, two_handles, read_while_open, tail_a_log, atomic_save,
    atomic_save_with_a_temporary_file, temporary_file_moved, temporary_folder, spooled, rotate_checkpoints,
    resume_if_exists, header_if_new, logging_handlers, rotating_log, json_per_epoch, pickle_and_numpy,
    numpy_to_an_open_file, memory_map, mapped_bytes, paths, trees, clean_start, next_run_number, archives,
    change_folder, torch_files, torch_save_fails, errors, exception_inside, descriptors,
    redirected_output, positions, large_file, database, shelf, overwrite, not_closed,
    device_and_descriptor, unlink_while_open, rename_while_open, count_lines_then_append, write_at_exit,
]  # fmt: skip

if __name__ == "__main__":
    early.close()
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
