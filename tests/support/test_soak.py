"""A soak counts the results that pytest reports, and its page shows them."""

from pathlib import Path

import pytest
from support import soak, torch_soak
from support.soak import counted, page


def test_failures_and_errors_are_counted_as_failed(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="7" failures="2" errors="1" skipped="1"><testcase/></testsuite></testsuites>'
    )
    assert counted(report) == {"tests": 7, "failed": 3, "skipped": 1}


ONE = {"tests": 3, "failed": 0, "skipped": 0, "seconds": 1.5, "commit": "abc1234", "day": "2026-11-02"}


def test_a_report_of_many_files_has_the_counts_of_each(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.jobs.test_a" name="one" time="1.5"/>'
        '<testcase classname="tests.jobs.test_a" name="two" time="1"><failure/></testcase>'
        '<testcase classname="tests.jobs.test_ba" name="one" time="1"><skipped/></testcase>'
        '<testcase classname="" name="tests.jobs.test_c" time="0"><error/></testcase></testsuite></testsuites>'
    )
    names = [f"tests/jobs/test_{name}.py" for name in ("a", "ba", "c", "d")]
    assert torch_soak.count_by_file(report, names) == {
        names[0]: {"tests": 2, "failed": 1, "skipped": 0, "seconds": 2.5},
        names[1]: {"tests": 1, "failed": 0, "skipped": 1, "seconds": 1.0},
        names[2]: {"tests": 1, "failed": 1, "skipped": 0, "seconds": 0.0},
        names[3]: {"tests": 0, "failed": 0, "skipped": 0, "seconds": 0.0},
    }


def test_the_page_has_the_sums_of_folders_and_the_commits_of_all_files():
    failed, older = {**ONE, "failed": 1}, {**ONE, "commit": "def5678", "day": "2026-11-01"}
    text = page({"tests/a/test_x.py": ONE, "tests/a/test_y.py": older, "tests/b/test_z.py": failed})
    assert "- 1 files or parts of files at commit def5678, on 2026-11-01\n- 2 files" in text
    assert "| tests/a | 6 | 0 | 0 | 3 | 2026-11-01 to 2026-11-02 |" in text
    assert "| tests/b | 3 | 1 | 0 | 1.5 | 2026-11-02 |" in text
    assert "| all | 9 | 1 | 0 | 4.5 | 2026-11-01 to 2026-11-02 |" in text
    assert "- tests/b/test_z.py: 1 of 3 failed\n" in text


def test_a_soak_runs_what_has_not_passed_at_its_commit_the_oldest_first():
    parts = [soak.Part(f"tests/test_{name}.py", ()) for name in "abcde"]
    results = {
        "tests/test_a.py": ONE,
        "tests/test_b.py": {**ONE, "commit": "def5678", "day": "2026-11-01"},
        "tests/test_c.py": {**ONE, "failed": 1},
        "tests/test_d.py": {**ONE, "commit": "fed8765", "day": "2026-10-30"},
    }
    ordered = [part.name for part in soak.order_parts(parts, results, "abc1234")]
    assert ordered == [f"tests/test_{name}.py" for name in "cedb"]


def test_results_are_kept_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    assert soak.read_results() == {}
    (tmp_path / "docs").mkdir()
    results = {"tests/test_y.py": ONE, "tests/test_x.py": {**ONE, "failed": 2}}
    soak.write_results(results)
    assert soak.read_results() == results
    assert (tmp_path / "docs/soak.json").read_text().count("\n") == 4


def test_the_committed_results_are_those_of_the_page():
    results = soak.read_results()
    assert {"commit", "day", "tests", "failed", "skipped", "seconds"} == set.intersection(*map(set, results.values()))
    shown = (soak.ROOT / "docs" / "soak.md").read_text()
    assert shown.startswith(page(results).rstrip())


def test_a_file_that_hangs_is_killed_and_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "FILE_SECONDS", 3.0)
    file = tmp_path / "test_hangs.py"
    file.write_text("import time\n\n\ndef test_it():\n    time.sleep(600)\n")
    counts = soak.run(soak.Part(str(file), (str(file),)), {"FAULTS_JSON": tmp_path / "faults.jsonl"})
    assert (counts["tests"], counts["failed"]) == (1, 1)
    assert counts["seconds"] < 60


def test_the_page_names_the_files_that_have_not_run():
    text = page({"tests/a/test_x.py": ONE}, missing=["tests/b/test_z.py"])
    assert text.endswith("Not run yet: tests/b/test_z.py.\n")
    assert "Not run yet" not in page({"tests/a/test_x.py": ONE})


def test_long_files_run_in_parts_whose_results_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "tests/test_long.py"
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "LONG", (name,))
    (tmp_path / "tests").mkdir()
    numbers = f"range({soak.PART_TESTS + 3})"
    (tmp_path / name).write_text(
        f"import pytest\n\n@pytest.mark.parametrize('n', {numbers})\ndef test_it(n):\n    assert n != 2\n"
    )
    results: dict[str, soak.Result] = {}
    parts = soak.list_parts(name, results)
    (tmp_path / "docs").mkdir()
    soak.soak(parts, results, "abc", {}, parallel=2)
    assert [results[part.name]["tests"] for part in parts] == [soak.PART_TESTS, 3]
    assert [results[part.name]["failed"] for part in parts] == [1, 0]
    assert soak.read_results() == results
    assert {result["commit"] for result in results.values()} == {"abc"}
    assert f"- {parts[0].name}: 1 of {soak.PART_TESTS} failed\n" in page(results)
    # Another test before all others leaves their results; without one of the last three they have none.
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(f"def test_first(): pass\n{text}")
    more = soak.list_parts(name, results)
    assert {part.name for part in more[:2]} == {part.name for part in parts}
    assert [part.tests for part in more[2:]] == [(f"{name}::test_first",)]
    (tmp_path / name).write_text(text.replace(numbers, f"range({soak.PART_TESTS + 2})"))
    left = soak.list_parts(name, results)
    assert [part.name in results for part in left] == [True, False]
    assert left[1].tests == parts[1].tests[:2]


def test_the_parts_of_a_long_file_have_its_tests():
    results = soak.read_results()
    parts = soak.list_parts("tests/ownership/test_divided_models.py", results)
    assert len(parts) > 1
    assert all(test.startswith("tests/ownership/test_divided_models.py::") for part in parts for test in part.tests)
    assert len({test for part in parts for test in part.tests}) == sum(len(part.tests) for part in parts) > 400
    assert all(part.digests == results[part.name]["digests"] for part in parts if part.name in results)


def test_the_longest_files_exist():
    assert all((soak.ROOT / name).exists() for name in (*soak.LONG, soak.DATABASE, *soak.PUBLISHED))
