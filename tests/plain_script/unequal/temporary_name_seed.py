import tempfile
import zlib

from training import source, train


def name():
    with tempfile.TemporaryDirectory() as folder:
        return zlib.crc32(folder.encode())


train(seed=source(name))
