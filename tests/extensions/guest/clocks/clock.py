"""A clock: counts the datagrams that it gets, and writes the count at its end, to its log."""

import signal
import socket
import sys
import time


def main(address: str, lifetime: int) -> None:
    count = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(address)
        print("ready", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(f"counted {count}", file=sys.stderr)))
        while not lifetime or count < lifetime:
            own.recv(16)
            count += 1
    time.sleep(0.3)  # its socket is closed: workers know it before the agent does
    sys.exit(7)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
