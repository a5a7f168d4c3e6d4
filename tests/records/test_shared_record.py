"""Records in shared memory: readers get whole ones, whatever the writer does meanwhile."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.jobs import wait_until

from rankless.records.shared_record import RecordWriter, open_shared_file, read_record, read_sequence

SIZE = 1 << 14


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = open_shared_file("test-record", SIZE)
    assert descriptor is not None
    yield descriptor
    os.close(descriptor)


def writer_of(file: int, offset: int = 0) -> RecordWriter:
    return RecordWriter(memoryview(mmap.mmap(file, SIZE))[offset:])


def test_the_latest_record_is_read_and_has_a_higher_number(file: int):
    assert read_record(file) is None
    assert read_sequence(file) == 0
    writer = writer_of(file)
    assert writer.capacity == SIZE - 24
    numbers = []
    for data in (b"first, which is long", b"", b"third", b"x" * writer.capacity):
        writer.write(data)
        record = read_record(file)
        assert record is not None
        assert record.data == data
        assert read_sequence(file) == record.sequence
        numbers.append(record.sequence)
    assert numbers == sorted(set(numbers))


def test_a_record_may_be_a_part_of_the_file(file: int):
    writer_of(file, offset=4096).write(b"here")
    assert read_record(file) is None
    record = read_record(file, offset=4096, size=4096)
    assert record is not None
    assert record.data == b"here"
    assert read_record(file, offset=SIZE) is None


def test_a_record_that_is_too_long_is_refused_and_the_next_one_is_read(file: int):
    writer = writer_of(file)
    writer.write(b"before")
    with pytest.raises(ValueError):  # noqa: PT011  # the interpreter's text about slices
        writer.write(b"x" * SIZE)
    writer.write(b"after")
    record = read_record(file)
    assert record is not None
    assert record.data == b"after"


def test_a_writer_that_died_within_a_record_leaves_none_and_the_next_one_goes_on(file: int):
    writer_of(file).write(b"whole")
    before = read_sequence(file)
    os.pwrite(file, (before + 1).to_bytes(8, "little"), 0)
    assert read_record(file) is None
    writer_of(file).write(b"by another process")
    record = read_record(file)
    assert record is not None
    assert record.data == b"by another process"
    assert record.sequence > before + 1
    assert record.sequence % 2 == 0


def test_damaged_data_and_a_damaged_length_are_no_record(file: int):
    writer_of(file).write(b"whole")
    os.pwrite(file, b"W", 24)
    assert read_record(file) is None
    writer_of(file).write(b"whole")
    os.pwrite(file, (1 << 60).to_bytes(8, "little"), 8)
    assert read_record(file) is None


WRITER = """
import mmap, sys
from rankless.records.shared_record import RecordWriter
writer = RecordWriter(memoryview(mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))))
print("ready", flush=True)
number = 0
while True:
    number += 1
    writer.write(str(number).encode() * (number % 500 + 1))
"""


def test_a_reader_beside_a_busy_writer_gets_whole_records_only(file: int):
    command = [sys.executable, "-c", WRITER, str(file), str(SIZE)]
    with subprocess.Popen(command, pass_fds=[file], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            numbers: list[int] = []

            def read() -> bool:
                record = read_record(file)
                if record is not None:
                    number = record.sequence // 2
                    assert record.data == str(number).encode() * (number % 500 + 1)
                    numbers.append(number)
                return len(set(numbers)) >= 100

            wait_until(read)
        finally:
            process.kill()
    assert numbers == sorted(numbers)
