"""What the terminal makes of the bytes that workers write."""

from rankless.launch.supervisor.shared_files import SharedFiles
from rankless.launch.worker_output import PrefixedLines, WholeLines
from rankless.records.events import FileOpened


def test_a_prefix_stands_before_each_line_however_it_ends_and_wherever_it_is_cut():
    for text in (b"one\r\ntwo\rthree\n", b"one\ntwo\nthree"):
        for cut in range(len(text)):
            shown: list[bytes] = []
            lines = PrefixedLines("[1] ", shown.append)
            lines.write(text[:cut])
            lines.idle()
            lines.write(text[cut:])
            lines.close()
            assert b"".join(shown) == b"[1] one\n[1] two\n[1] three\n"


def test_whole_lines_wait_for_their_end_and_a_beginning_for_a_turn_without_more():
    shown: list[bytes] = []
    lines = WholeLines(shown.append)
    lines.write(b"one\ntw")
    assert shown == [b"one\n"]
    lines.write(b"o\n50%\r")
    lines.write(b"name: ")
    assert shown == [b"one\n", b"two\n50%\r"]
    lines.idle()
    lines.idle()
    lines.close()
    assert shown == [b"one\n", b"two\n50%\r", b"name: "]


def test_a_file_that_two_ranks_write_is_named_to_a_foreign_script_in_its_own_words():
    files = SharedFiles(foreign=True)
    first, second = (FileOpened(rank=rank, time_ns=0, path="/data/x", line="main.py:3") for rank in range(2))
    assert files.check(first) is None
    said = files.check(second)
    assert said is not None
    assert "ranks 0 and 1 both write" in said
    assert "RANK is 0" in said
    assert "rankless" not in said
