"""Files that are cut, altered, foreign or malicious: they always raise a CheckpointError, and have no other effect."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import struct
import sys
import threading
import zipfile

import msgspec
import pytest
import torch
from checkpoint.saved_objects import SOLO, Holder, save

from rankless.checkpoint import load
from rankless.checkpoint.manifest import Manifest, encode_manifest
from rankless.checkpoint.manifest_io import MANIFEST_LIMIT_BYTES, read_manifest
from rankless.errors import CheckpointError

STATE = {"numbers": [1, 2.5, "x"], "t": torch.arange(6.0), "n": torch.ones(2, 3)}
HARMFUL_EVENTS = (
    "exec",
    "compile",
    "import",
    "os.system",
    "subprocess.Popen",
    "os.remove",
    "os.rename",
    "socket.connect",
)


class Watch:
    """Records which files a process opens and which code it runs."""

    def __init__(self):
        self.thread = None
        self.opened = []
        self.harmful = []
        sys.addaudithook(self._note)

    def _note(self, event, arguments):
        if self.thread != threading.get_ident():
            return
        if event == "open":
            self.opened.append(arguments[0])
        elif event in HARMFUL_EVENTS or event.startswith("pickle"):
            self.harmful.append((event, arguments))

    def __enter__(self):
        self.opened, self.harmful = [], []
        self.thread = threading.get_ident()
        return self

    def __exit__(self, *_):
        self.thread = None


@pytest.fixture(scope="module")
def watch():
    return Watch()


def test_the_watch_sees_what_a_pickle_does(watch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with watch:
        pickle.loads(pickle.dumps(Bomb()))
        open("exploded").close()
    assert {event for event, _ in watch.harmful} >= {"pickle.find_class", "os.system"}
    assert watch.opened == ["exploded"]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save(tmp_path / "c", {"thing": Holder(STATE)}, extra={"epoch": 1})
    return tmp_path / "c"


def refuse(folder, watch):
    """Return the text of the error. Assert that no other file was opened, nothing was run and nothing restored."""
    back = Holder("untouched")
    draw = torch.get_rng_state()
    with watch, pytest.raises(CheckpointError) as caught:
        load(folder, {"thing": back}, mesh=SOLO)
    assert back.state == "untouched"
    assert torch.equal(torch.get_rng_state(), draw)
    assert not watch.harmful
    for path in watch.opened:
        assert isinstance(path, int) or os.path.dirname(os.fspath(path)) == str(folder), path
    return str(caught.value)


def rewrite(folder, **changes):
    """Change the manifest, and give it the checksum of the change."""
    manifest = msgspec.structs.replace(read_manifest(folder), **changes)
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))


def rewrite_json(folder, change):
    """Change the manifest as plain JSON, with the right checksum if it is still a manifest."""
    tree = json.loads((folder / "manifest.json").read_text())
    change(tree)
    data = json.dumps(tree).encode()
    with contextlib.suppress(msgspec.DecodeError):
        data = encode_manifest(msgspec.json.decode(data, type=Manifest))
    (folder / "manifest.json").write_bytes(data)


def replace_tensors(folder, data):
    """Replace the bytes of the tensor file, and give the manifest their checksum."""
    (folder / "tensors.safetensors").write_bytes(data)
    entry = read_manifest(folder).files[0]
    entry = msgspec.structs.replace(entry, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    rewrite(folder, files=[entry])


def tensor_bytes(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_a_file_cut_at_every_sixteenth_is_refused(folder, watch, name):
    whole = (folder / name).read_bytes()
    for part in range(16):
        (folder / name).write_bytes(whole[: len(whole) * part // 16])
        assert name in refuse(folder, watch)
    (folder / name).unlink()
    assert name in refuse(folder, watch)


def alter(whole, draw):
    """Return a copy with bits flipped, bytes doubled, dropped or overwritten, or a piece moved."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 3, 20))):
        at = draw.randrange(len(data))
        length = draw.choice((1, 8, 64))
        piece = data[at : at + length]
        kind = draw.randrange(5)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:at] = piece
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at : at + length] = draw.randbytes(len(piece))
        else:
            del data[at : at + length]
            to = draw.randrange(len(data) + 1)
            data[to:to] = piece
        data = data or bytearray(b"\0")
    return bytes(data)


def fuzz(folder, watch, seeds):
    """Alter one file for each seed."""
    files = [folder / "manifest.json", folder / "tensors.safetensors"]
    wholes = [file.read_bytes() for file in files]
    for seed in seeds:
        draw = random.Random(seed)
        which = draw.randrange(2)
        data = alter(wholes[which], draw)
        files[which].write_bytes(data)
        if data != wholes[which]:
            refuse(folder, watch)
        files[which].write_bytes(wholes[which])


@pytest.mark.slow
def test_files_altered_at_random_are_refused(folder, watch):
    fuzz(folder, watch, range(200))


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", range(20))
def test_many_more_files_altered_at_random_are_refused(folder, watch, block):
    fuzz(folder, watch, range(1000 * (block + 1), 1000 * (block + 2)))


@pytest.mark.slow
def test_manifests_altered_with_a_right_checksum_load_or_are_refused(folder, watch):
    """An attacker who knows the format replaces every leaf of the tree by every other kind."""
    whole = (folder / "manifest.json").read_bytes()
    values = [
        None,
        -1,
        10**40,
        1e308,
        "",
        "../x",
        [],
        {},
        [[1]],
        {"kind": "tensor"},
        {"kind": "bytes", "data": "!"},
        True,
    ]
    paths = [path for path in leaves(json.loads(whole)) if path not in (["sha256"], ["rankless"])]
    draw = random.Random(0)
    refused = 0
    for path in draw.sample(paths, min(60, len(paths))):
        value = draw.choice(values)
        rewrite_json(folder, lambda tree, path=path, value=value: put(tree, path, value))
        with watch:
            try:
                load(folder, {"thing": Holder()}, mesh=SOLO)
            except CheckpointError:
                refused += 1
        assert not watch.harmful
        (folder / "manifest.json").write_bytes(whole)
    assert refused > 20


def leaves(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    return found or [list(path)]


def put(tree, path, value):
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_pickle_under_our_names_is_not_opened(folder, watch, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for data in (pickle.dumps(Bomb()), torch_file(Bomb()), zip_bomb()):
        replace_tensors(folder, data)
        assert "SafetensorError" in refuse(folder, watch)
        kept = (folder / "manifest.json").read_bytes()
        (folder / "manifest.json").write_bytes(data)
        assert "cannot be read" in refuse(folder, watch)
        (folder / "manifest.json").write_bytes(kept)
    assert not (folder.parent / "exploded").exists()


def torch_file(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def zip_bomb():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", b"\0" * (50 << 20))
    return stream.getvalue()


OUTSIDE_NAMES = ["../secret.safetensors", "/etc/passwd", "sub/tensors.safetensors", "tensors-1.safetensors/../../x", ""]
OUTSIDE_NAMES += ["tensors-01.safetensors", "manifest.json", "tensors.safetensors\0", "tensors-99999999999.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE_NAMES)
def test_file_names_that_lead_out_of_the_folder_are_refused(folder, watch, name):
    (folder.parent / "secret.safetensors").write_bytes((folder / "tensors.safetensors").read_bytes())
    entry = read_manifest(folder).files[0]
    rewrite(folder, files=[msgspec.structs.replace(entry, name=name)])
    assert "a tensor file called" in refuse(folder, watch)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_links_pipes_and_folders_in_place_of_files_are_refused(folder, watch, name):
    file = folder / name
    (folder.parent / "elsewhere").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(folder.parent / "elsewhere")
    assert name in refuse(folder, watch)
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in refuse(folder, watch)
    file.unlink()
    file.mkdir()
    assert name in refuse(folder, watch)


def test_files_and_tensors_listed_twice_are_refused(folder, watch):
    whole = (folder / "manifest.json").read_bytes()
    entry = read_manifest(folder).files[0]
    doubled = msgspec.structs.replace(entry, tensors=[*entry.tensors, entry.tensors[0]])
    fewer = msgspec.structs.replace(entry, tensors=[name for name in entry.tensors if name != "thing.n"])
    wrong = [([entry, entry], "twice"), ([doubled], "twice"), ([fewer], "other tensors than the manifest lists")]
    for files, what in wrong:
        rewrite(folder, files=files)
        assert what in refuse(folder, watch)
        (folder / "manifest.json").write_bytes(whole)


GIANT = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 100_000_000) + b"{" * 100,
        tensor_bytes({"thing.t": GIANT}),
        tensor_bytes({"thing.t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}),
        tensor_bytes({"thing.t": {"dtype": "F32", "shape": [0], "data_offsets": [8, 0]}}),
        tensor_bytes(b'{"thing.t": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, ' * 2),
        tensor_bytes(b"[" * 100_000),
        b"",
    ],
)
def test_tensor_files_that_declare_what_they_do_not_hold_are_refused(folder, watch, data):
    replace_tensors(folder, data)
    refuse(folder, watch)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"NaN",
        b'{"format": "rankless checkpoint", "version": NaN}',
        b'{"format": "rankless checkpoint", "version": 1e999}',
        b'{"format": "rankless checkpoint", "version": 2, "x": ' + b"[" * 200_000,
        b'{"format": "rankless checkpoint", "version": 2, "objects": {"thing": '
        + b'{"kind":"sequence","type":"list","items":[' * 5000
        + b"]}" * 5000
        + b"}}",
        b'{"format": "rankless checkpoint", "version": ' + b"9" * 100_000 + b"}",
        b'{"format": "rankless checkpoint", "version": 2}',
        b'{"format": "' + b"x" * 1_000_000 + b'", "version": 2}',
    ],
)
def test_texts_that_are_no_manifest_are_refused_in_few_words(folder, watch, text):
    (folder / "manifest.json").write_bytes(text)
    assert len(refuse(folder, watch)) < 2000


def test_a_manifest_larger_than_any_of_ours_is_not_read_whole(folder, watch):
    with (folder / "manifest.json").open("r+b") as stream:
        stream.truncate(MANIFEST_LIMIT_BYTES * 100)
    assert "bytes" in refuse(folder, watch)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"kind": "tensor", "name": "thing.t", "dtype": "float32", "shape": [1 << 50]}, "float32 (6,)"),
        ({"kind": "tensor", "name": "thing.t", "dtype": "int64", "shape": [6]}, "float32 (6,)"),
        ({"kind": "tensor", "name": "nothing", "dtype": "int64", "shape": [6]}, "no such tensor"),
        ({"kind": "tensor", "name": "thing.t", "dtype": "float32", "shape": [6], "numpy": "O"}, "numpy"),
        ({"kind": "numpy", "dtype": "O", "data": "AAAAAAAAAAA="}, "numpy"),
        ({"kind": "numpy", "dtype": "f7", "data": "AAAAAAAAAAA="}, "numpy"),
        ({"kind": "numpy", "dtype": "<i8", "data": "AAAA"}, "8 bytes"),
        ({"kind": "numpy", "dtype": "V99999999999", "data": ""}, "numpy"),
        ({"kind": "float", "text": "__import__('os')"}, "Invalid"),
        ({"kind": "call", "function": "os.system"}, "Invalid"),
    ],
)
def test_nodes_that_contradict_their_tensors_are_refused(folder, watch, state, what):
    rewrite_json(folder, lambda tree: put(tree, ["objects", "thing"], state))
    assert what in refuse(folder, watch)


@pytest.mark.parametrize("part", ["torch", "numpy", "python"])
def test_a_random_state_that_makes_no_sense_is_refused_and_the_generators_stay(folder, watch, part):
    manifest = read_manifest(folder)
    tree = msgspec.to_builtins(manifest.random[0])
    tree["items"] = [[key, 7 if key == part else value] for key, value in tree["items"]]
    rewrite_json(folder, lambda whole: put(whole, ["random"], [tree]))
    draw = torch.get_rng_state()
    with watch, pytest.raises(CheckpointError, match="random=False"):
        load(folder, {}, mesh=SOLO)
    assert torch.equal(torch.get_rng_state(), draw)
    assert not watch.harmful
