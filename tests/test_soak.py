"""A soak counts what pytest reports, and its page has the raw counts."""

from pathlib import Path

from soak import counted, page


def test_failures_and_errors_are_counted_as_failed(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="7" failures="2" errors="1" skipped="1"><testcase/></testsuite></testsuites>'
    )
    assert counted(report) == {"tests": 7, "failed": 3, "skipped": 1}


def test_the_page_adds_up_folders_and_names_the_commit():
    one = {"tests": 3, "failed": 1, "skipped": 0, "seconds": 1.5}
    text = page("abc1234", {"tests/a/test_x.py": one, "tests/a/test_y.py": one, "tests/b/test_z.py": one})
    assert "at commit abc1234" in text
    assert "| tests/a | 6 | 2 | 0 | 3 |" in text
    assert "| all | 9 | 3 | 0 | 4.5 |" in text
