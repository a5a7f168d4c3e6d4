import socket
import zlib

from training import source, train

train(seed=source(lambda: zlib.crc32(socket.gethostname().encode())))
