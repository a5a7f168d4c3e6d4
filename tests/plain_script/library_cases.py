"""A plain script: files that libraries write in C, C++ or Rust. Cases whose library is not installed are left out.

What a case returns is printed, so that it is compared too. Its files are compared by their bytes.
"""

import fcntl
import importlib.util
import io
import os
import pickle
import shutil
import sqlite3
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def torch_shared_file():
    shared = torch.from_file("shared.bin", shared=True, size=6, dtype=torch.float32)
    shared.fill_(1.0)
    for _ in range(20):
        shared.add_(1.0)  # twice as much if two ranks map one file
    read = np.fromfile("shared.bin", dtype=np.float32)
    shared[0] = -1.0
    again = np.fromfile("shared.bin", dtype=np.float32)
    del shared
    other = torch.from_file("shared.bin", shared=False, size=6)
    return read.tolist(), again.tolist(), other.tolist()


def numpy_maps():
    mapped = np.lib.format.open_memmap("map.npy", mode="w+", dtype=np.float64, shape=(3, 2))
    seen = []
    for row in range(3):
        mapped[row] = row + 0.5
        mapped.flush()
        seen.append(np.load("map.npy").sum().item())
    again = np.memmap("raw.bin", dtype=np.int32, mode="w+", shape=4)
    again[:] = 7
    del again
    third = np.memmap("raw.bin", dtype=np.int32, mode="r+")
    third[1] = 9
    third.flush()
    return seen, np.fromfile("raw.bin", dtype=np.int32).tolist(), np.load("map.npy", mmap_mode="r").sum().item()


def locks():
    import filelock

    with filelock.FileLock("a.lock"):
        Path("a.txt").write_text("locked")
    with open("b.txt", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("row\n")
        Path("c.txt").write_text("within")
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(os.open("run.lock", os.O_CREAT | os.O_EXCL))
    try:
        os.open("run.lock", os.O_CREAT | os.O_EXCL)
    except FileExistsError as error:
        return str(error), sorted(os.listdir())


def names_by_a_library():
    import joblib

    Path("source.bin").write_bytes(b"w" * 1000)
    torch.hub.download_url_to_file(Path("source.bin").absolute().as_uri(), "target.bin", progress=False)
    calls = []
    twice = joblib.Memory("cache", verbose=0).cache(lambda x: calls.append(x) or 2 * x)
    found = [twice(2), twice(2), twice(3)], calls
    shutil.rmtree("cache")
    return found, os.path.getsize("target.bin")


def two_connections():
    first = sqlite3.connect("a.db")
    first.execute("create table t (x)")
    second, seen = sqlite3.connect("a.db"), []
    for number in range(3):
        first.execute("insert into t values (?)", (number,))
        first.commit()
        seen.append(second.execute("select count(*) from t").fetchone())
    with sqlite3.connect("copy.db") as copy:
        first.backup(copy)
    copy.close()
    with sqlite3.connect("file:copy.db?mode=rw", uri=True) as copy:
        copy.execute("insert into t values (7)")
    copy.close()
    reader = sqlite3.connect("file:copy.db?mode=ro", uri=True)
    return seen, reader.execute("select sum(x) from t").fetchone(), second.execute("select sum(x) from t").fetchone()


def tokenizer():
    from tokenizers import Tokenizer, models, trainers

    made = Tokenizer(models.BPE())
    made.train_from_iterator(["one two three two", "two two"], trainers.BpeTrainer(vocab_size=30, show_progress=False))
    os.makedirs("model")
    made.save("model/tokenizer.json")
    names = made.model.save("model", "part")
    try:
        made.save("missing/tokenizer.json")
    except Exception as error:
        found = str(error)
    return Tokenizer.from_file("model/tokenizer.json").get_vocab_size(), names, found


def exported_program():
    model = torch.nn.Linear(2, 3)
    torch.export.save(torch.export.export(model, (torch.ones(4, 2),)), "model.pt2")
    loaded = torch.export.load("model.pt2").module()(torch.ones(4, 2))
    return torch.equal(loaded, model(torch.ones(4, 2)))


def scripted_module():
    module = torch.jit.script(torch.nn.Linear(2, 3))
    module.save("a.pt")
    torch.jit.save(module, Path("b.pt"))
    torch.jit.trace(torch.nn.Linear(2, 3), torch.ones(1, 2)).save("c.pt")
    torch.jit.trace(torch.relu, torch.ones(1, 2)).save("d.pt")
    shapes = []
    for name in ("a.pt", "b.pt", "c.pt", "d.pt"):
        shapes.append(tuple(torch.jit.load(name)(torch.ones(1, 2)).shape))
        os.remove(name)  # it has constants in the order of a set
    return shapes


def package():
    with torch.package.PackageExporter("package.pt") as exporter:
        exporter.save_pickle("values", "values.pkl", {"a": torch.ones(2)})
        exporter.save_text("values", "note.txt", "one")
    importer = torch.package.PackageImporter("package.pt")
    return importer.load_pickle("values", "values.pkl")["a"].tolist(), importer.load_text("values", "note.txt")


def profile_trace():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(4).sum()
    profile.export_chrome_trace("trace.json")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(4).sum()
    profile.export_chrome_trace("zipped.json.gz")
    sizes = [os.path.getsize(name) > 100 for name in ("trace.json", "zipped.json.gz")]
    os.remove("trace.json")  # it has times
    os.remove("zipped.json.gz")
    return sizes


def hdf5():
    import h5py

    os.makedirs("out/new")
    (batch,) = next(iter(DataLoader(TensorDataset(torch.arange(14.0).reshape(7, 2)), batch_size=7)))
    with h5py.File(Path("out/new/a.h5"), "w") as file:
        file["values"] = VALUES
        file["batch"] = batch.numpy()
        file.create_dataset("tensor", data=batch)
        file.attrs["note"] = "one"
    log = h5py.File("log.h5", "w")
    losses = log.create_dataset("loss", shape=(0,), maxshape=(None,), dtype="f8")
    for (rows,) in DataLoader(TensorDataset(torch.arange(12.0).reshape(6, 2)), batch_size=2):
        losses.resize(losses.shape[0] + 1, axis=0)
        losses[-1] = rows.mean()
        log.flush()
    during = log["loss"][:].tolist()
    log.close()
    for step in range(3):
        with h5py.File(name=b"out/new/a.h5", mode="a") as file:
            file.create_dataset(f"step{step}", data=VALUES + step)
    with h5py.File("log.h5", "r") as file, h5py.File("out/new/a.h5") as other:
        after = file["loss"][:].tolist(), sorted(other), other["batch"][:].sum().item(), other["tensor"][:].sum().item()
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file["x"] = 1
    Path("buffer.h5").write_bytes(buffer.getvalue())
    with open("plain_file.h5", "wb+") as raw, h5py.File(raw, "w") as file:
        file["x"] = VALUES
    leaked = h5py.File("leaked.h5", "w")
    leaked["x"] = 3
    del leaked
    with h5py.File("leaked.h5") as file:
        return during, after, file["x"][()].item(), os.path.getsize("buffer.h5")


def hdf5_errors():
    import h5py

    found = []
    for name, mode in (("missing/a.h5", "w"), ("missing.h5", "r"), ("missing.h5", "r+"), ("a.h5", "odd")):
        try:
            h5py.File(name, mode)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    try:
        with h5py.File("half.h5", "w") as file:
            file["a"] = VALUES
            raise KeyError("within")
    except KeyError:
        pass
    try:
        h5py.File("half.h5", "x")
    except FileExistsError as error:
        found.append(str(error))
    with h5py.File("half.h5") as file:
        return found, list(file)


def pandas_files():
    import pandas as pd

    frame = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]})
    found = []
    frame.to_parquet("a.parquet")
    frame.to_feather(Path("a.feather"))
    frame.to_csv("a.csv")
    frame.to_csv("a.csv.gz", compression={"method": "gzip", "mtime": 1})
    frame.to_pickle("a.pkl")
    frame.to_json("a.json")
    found += [pd.read_parquet("a.parquet").b.sum(), pd.read_feather("a.feather").a.sum(), len(pd.read_csv("a.csv"))]
    frame.to_orc("a.orc")
    found += [pd.read_orc("a.orc").b.sum(), pd.read_pickle("a.pkl").a.sum(), pd.read_json("a.json").a.sum()]
    try:
        frame.to_parquet("missing/a.parquet")
    except OSError as error:
        found.append(type(error).__name__)
    while not os.path.exists("log.csv") or os.path.getsize("log.csv") < 60:
        frame.to_csv("log.csv", mode="a", header=not os.path.exists("log.csv"))
    frame.to_parquet("parts", partition_cols=["a"])
    parts = sorted(str(path.parent) for path in Path("parts").rglob("*.parquet"))
    for path in Path("parts").rglob("*.parquet"):
        path.rename(path.with_name("part"))  # its name is drawn
    return [float(each) if not isinstance(each, str) else each for each in found], parts, len(pd.read_csv("log.csv"))


def pandas_tables():
    import pandas as pd

    frame = pd.DataFrame({"a": [1, 2, 3]})
    frame.to_hdf("a.h5", key="one")
    frame.to_hdf("a.h5", key="two", mode="a")
    with pd.HDFStore("store.h5") as store:
        for _ in range(4):
            store.append("x", frame)
        inside = len(store["x"])
    found = pd.read_hdf("a.h5", "two").a.sum().item(), inside, len(pd.read_hdf("store.h5", "x"))
    os.remove("a.h5")  # it has times
    os.remove("store.h5")
    return found


def excel():
    import openpyxl
    import pandas as pd

    pd.DataFrame({"a": [1, 2]}).to_excel("a.xlsx")
    book = openpyxl.load_workbook("a.xlsx")
    book.active.append([9, 9])
    book.save("a.xlsx")
    found = pd.read_excel("a.xlsx").a.tolist()
    os.remove("a.xlsx")  # it has times
    return found


def arrow():
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.dataset
    import pyarrow.feather
    import pyarrow.ipc
    import pyarrow.orc
    import pyarrow.parquet as pq

    table = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    pq.write_table(table, "a.parquet")
    pq.write_table(table, where=Path("b.parquet"))
    with open("c.parquet", "wb") as file:
        pq.write_table(table, file)
    with pq.ParquetWriter("d.parquet", table.schema) as writer:
        for _ in range(3):
            writer.write_table(table)
    writer = pq.ParquetWriter("e.parquet", table.schema)
    try:
        writer.write_table(pa.table({"odd": [1]}))
    except ValueError as error:
        failed = type(error).__name__
    writer.close()
    pa.feather.write_feather(table, "a.feather")
    pa.csv.write_csv(table, "a.csv")
    with pa.csv.CSVWriter("b.csv", table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table)
    pa.orc.write_table(table, "a.orc")
    with pa.OSFile("a.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write(table)
    with pa.output_stream("stream.bin") as stream:
        stream.write(b"some bytes")
    with pa.ipc.new_stream("direct.arrows", table.schema) as writer:
        writer.write(table)
    pa.dataset.write_dataset(table, "set", format="parquet")
    pq.write_to_dataset(table, "set2", basename_template="part{i}.parquet")
    rows = [pq.read_table(f"{name}.parquet").num_rows for name in "abcd"]
    read = pa.ipc.open_file(pa.memory_map("a.arrow")).read_all().num_rows, pa.csv.read_csv("b.csv").num_rows
    return rows, failed, read, pa.dataset.dataset("set").count_rows(), sorted(os.listdir("set2")), os.listdir("set")


def polars_files():
    import polars as pl

    frame = pl.DataFrame({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]})
    frame.write_parquet("a.parquet")
    frame.write_csv("a.csv")
    frame.write_ipc(Path("a.ipc"))
    frame.write_json("a.json")
    frame.write_ndjson(file="a.ndjson")
    frame.lazy().filter(pl.col("a") > 1).sink_parquet("b.parquet")
    with open("open.csv", "w") as file:
        for _ in range(2):
            frame.write_csv(file)
    text = frame.write_csv()
    try:
        frame.write_csv("missing/a.csv")
    except Exception as error:
        failed = type(error).__name__
    found = [pl.read_parquet("a.parquet").height, pl.read_csv("a.csv").height, pl.read_ipc("a.ipc").height]
    return found, pl.scan_parquet("b.parquet").collect().height, text, failed


def images():
    import cv2

    image = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    done = [cv2.imwrite("a.png", image), cv2.imwrite(filename="b.jpg", img=image)]
    done.append(cv2.imwrite("missing/c.png", image))
    try:
        cv2.imwrite("d.odd", image)
    except cv2.error as error:
        done.append(type(error).__name__)
    return done, cv2.imread("a.png").sum().item()


def video():
    import cv2

    writer = cv2.VideoWriter("a.avi", cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    for frame in range(8):
        writer.write(np.full((48, 64, 3), frame * 20, np.uint8))
    opened = writer.isOpened()
    writer.release()
    late = cv2.VideoWriter()
    late.open("b.avi", cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    late.write(np.zeros((48, 64, 3), np.uint8))
    late.release()
    reader, count = cv2.VideoCapture("a.avi"), 0
    while reader.read()[0]:
        count += 1
    reader.release()
    return opened, count, isinstance(writer, cv2.VideoWriter)


def sound():
    import soundfile as sf

    wave = np.sin(np.arange(800) / 20)
    sf.write("a.wav", wave, 8000)
    sf.write(Path("b.flac"), torch.from_numpy(wave), 8000)
    with sf.SoundFile("c.wav", "w", samplerate=8000, channels=1) as file:
        for _ in range(3):
            file.write(wave)
    with sf.SoundFile("c.wav", "r+") as file:
        file.seek(10)
        file.write(np.ones(5))
    buffer = io.BytesIO()
    sf.write(buffer, wave, 8000, format="WAV")
    return [len(sf.read(name)[0]) for name in ("a.wav", "b.flac", "c.wav")], len(buffer.getvalue())


def lightning_memory():
    import lmdb

    with lmdb.open("data.lmdb", map_size=1 << 20) as environment:
        for number in range(3):
            with environment.begin(write=True) as transaction:
                transaction.put(str(number).encode(), pickle.dumps(number))
    again = lmdb.open("data.lmdb", map_size=1 << 20)
    with again.begin(write=True) as transaction:
        count = transaction.get(b"count") or b"0"
        transaction.put(b"count", b"%d" % (int(count) + 1))
    again.close()
    with lmdb.open("single.mdb", map_size=1 << 20, subdir=False) as environment, environment.begin(write=True) as it:
        it.put(b"a", b"b")
    reader = lmdb.open("data.lmdb", readonly=True, lock=False)
    with reader.begin() as transaction:
        found = list(transaction.cursor())
    reader.close()
    for lock in Path().rglob("lock.mdb"):
        lock.unlink()  # it has process ids
    Path("single.mdb-lock").unlink()
    return found


def arrays_in_chunks():
    import zarr

    array = zarr.create_array("a.zarr", shape=(8, 4), chunks=(2, 2), dtype="f4")
    seen = []
    for step in range(4):
        array[:] = step
        seen.append(float(zarr.open_array("a.zarr", mode="r")[:].sum()))
        array[step] = 10
        seen.append(array[:].sum().item())
    group = zarr.open_group("g.zarr", mode="w")
    group.create_array("x", data=VALUES)
    zarr.save("saved.zarr", VALUES)
    return seen, zarr.load("saved.zarr").sum().item(), zarr.open_group("g.zarr", mode="r")["x"][:].sum().item()


def climate():
    import netCDF4

    data = netCDF4.Dataset("a.nc", "w")
    data.createDimension("time", None)
    values = data.createVariable("x", "f4", ("time",))
    for step in range(4):
        values[step] = step * 1.5
    during = values[:].sum().item()
    data.close()
    with netCDF4.Dataset("a.nc", "a") as data:
        data["x"][4] = 100
    with netCDF4.Dataset("a.nc") as data:
        return during, data["x"][:].sum().item(), isinstance(data, netCDF4.Dataset)


def gradient_boosting():
    import lightgbm
    import xgboost

    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    booster = lightgbm.train({"verbose": -1, "num_threads": 1, "seed": 1}, lightgbm.Dataset(x, y), 3)
    same = booster.save_model("a.txt") is booster
    lightgbm.Dataset(x, y).construct().save_binary("a.bin")
    other = xgboost.train({"nthread": 1, "seed": 1}, xgboost.DMatrix(x, y), 3)
    other.save_model("a.json")
    classifier = xgboost.XGBClassifier(n_estimators=2, nthread=1).fit(x, y)
    classifier.save_model(Path("b.ubj"))
    loaded = lightgbm.Booster(model_file="a.txt").num_trees(), xgboost.Booster(model_file="a.json").num_boosted_rounds()
    try:
        booster.save_model("missing/a.txt")
    except Exception as error:
        return same, loaded, type(error).__name__


def duck():
    import duckdb

    connection = duckdb.connect("a.db")
    connection.execute("create table t (a integer)")
    for step in range(4):
        connection.execute("insert into t values (?)", [step])
    inside = connection.execute("select count(*), sum(a) from t").fetchall()
    connection.close()
    with duckdb.connect("a.db") as connection:
        connection.execute("insert into t values (10)")
    with duckdb.connect("a.db", read_only=True) as connection:
        found = connection.sql("select sum(a) from t").fetchall()
    os.remove("a.db")  # it has random numbers
    return inside, found


def figures():
    import matplotlib

    matplotlib.use("Agg")
    import imageio.v3 as imageio
    import matplotlib.pyplot as plt
    from PIL import Image

    image = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    figure, axes = plt.subplots()
    axes.plot([1, 2, 3])
    figure.savefig("a.png")
    figure.savefig(Path("new.svg"), metadata={"Date": None})
    plt.close(figure)
    Image.fromarray(image).save("b.png")
    with open("c.jpg", "wb") as file:
        Image.fromarray(image).save(file, "JPEG")
    imageio.imwrite("d.png", image)
    imageio.imwrite("e.gif", [image, image])
    plt.imsave("f.png", image[:, :, 0])
    os.remove("new.svg")  # it has drawn names
    return np.asarray(Image.open("b.png")).sum().item(), imageio.imread("d.png").sum().item()


def onnx_export():
    import onnx

    model = torch.nn.Linear(2, 3)
    torch.onnx.export(model, (torch.ones(1, 2),), "a.onnx", verbose=False)
    read = onnx.load("a.onnx")
    onnx.save(read, "b.onnx")
    names = sorted(os.listdir())
    for name in names:
        os.remove(name)
    return names, len(read.graph.node)


CASES = [
    torch_shared_file, numpy_maps, locks, names_by_a_library, two_connections, tokenizer,
    exported_program, scripted_module, package, profile_trace,
    hdf5, hdf5_errors, pandas_files, pandas_tables, excel, arrow, polars_files, images, video, sound, lightning_memory,
    arrays_in_chunks, climate, gradient_boosting, duck, figures, onnx_export,
]  # fmt: skip
NEEDED = {
    "hdf5": "h5py", "hdf5_errors": "h5py", "pandas_files": "pandas pyarrow", "pandas_tables": "pandas tables",
    "excel": "pandas openpyxl", "arrow": "pyarrow", "polars_files": "polars", "images": "cv2", "video": "cv2",
    "sound": "soundfile", "lightning_memory": "lmdb", "arrays_in_chunks": "zarr", "climate": "netCDF4",
    "gradient_boosting": "lightgbm xgboost", "duck": "duckdb", "figures": "matplotlib imageio",
    "onnx_export": "onnx onnxscript",
}  # fmt: skip


def is_installed(case):
    return all(importlib.util.find_spec(name) for name in NEEDED.get(case.__name__, "").split())


if __name__ == "__main__":
    base = os.getcwd()
    for case in CASES:
        if (sys.argv[1:] and case.__name__ not in sys.argv[1:]) or not is_installed(case):
            continue
        os.makedirs(case.__name__)
        os.chdir(case.__name__)
        torch.manual_seed(0)
        try:
            result = case()
        finally:
            os.chdir(base)
        print(case.__name__, repr(result), flush=True)
