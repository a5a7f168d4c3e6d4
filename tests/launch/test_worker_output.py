"""What the terminal makes of the bytes that workers write."""

from rankless.launch.supervisor.shared_files import SharedFiles
from rankless.launch.worker_output import PrefixedLines, WholeLines
from rankless.records.events import FileOpened


def test_a_prefix_precedes_each_line_whatever_its_end_and_wherever_it_is_cut():
    for text in (b"one\r\ntwo\rthree\n", b"one\ntwo\nthree"):
        for cut in range(len(text)):
            shown: list[bytes] = []
            lines = PrefixedLines("[1] ", shown.append)
            lines.write(text[:cut])
            lines.idle()
            lines.write(text[cut:])
            lines.close()
            assert b"".join(shown) == b"[1] one\n[1] two\n[1] three\n"


def test_lines_wait_for_their_end_and_unfinished_ones_for_half_a_second():
    shown: list[bytes] = []
    now = 7.0
    lines = WholeLines(shown.append, clock=lambda: now)
    lines.write(b"one\ntw")
    assert shown == [b"one\n"]
    now += 0.4
    lines.idle()
    lines.write(b"o\n50%\r")
    lines.write(b"na")
    now += 0.4
    lines.idle()
    lines.write(b"me: ")
    now += 0.4
    lines.idle()
    assert shown == [b"one\n", b"two\n50%\r"]
    now += 0.2
    lines.idle()
    lines.idle()
    lines.close()
    assert shown == [b"one\n", b"two\n50%\r", b"name: "]


def test_the_end_of_a_file_shows_an_unfinished_line_at_once():
    shown: list[bytes] = []
    lines = WholeLines(shown.append)
    lines.write(b"half")
    lines.close()
    assert shown == [b"half"]


def test_the_warning_for_a_file_of_two_ranks_suits_programs_without_rankless():
    files = SharedFiles(foreign=True)
    first, second = (FileOpened(rank=rank, time_ns=0, path="/data/x", line="main.py:3") for rank in range(2))
    assert files.check(first) is None
    text = files.check(second)
    assert text is not None
    assert "ranks 0 and 1 both write" in text
    assert "RANK is 0" in text
    assert "rankless" not in text
