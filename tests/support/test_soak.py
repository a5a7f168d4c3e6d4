"""A soak counts the results that pytest reports, and its page shows them."""

import json
import subprocess
from pathlib import Path

import pytest
from support import soak
from support.soak import counted, page


def test_failures_and_errors_are_counted_as_failed(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="7" failures="2" errors="1" skipped="1"><testcase/></testsuite></testsuites>'
    )
    assert counted(report) == {"tests": 7, "failed": 3, "skipped": 1}


def test_the_page_has_the_sums_of_folders_and_the_commit():
    one = {"tests": 3, "failed": 1, "skipped": 0, "seconds": 1.5}
    text = page("abc1234", {"tests/a/test_x.py": one, "tests/a/test_y.py": one, "tests/b/test_z.py": one})
    assert "at commit abc1234" in text
    assert "| tests/a | 6 | 2 | 0 | 3 |" in text
    assert "| all | 9 | 3 | 0 | 4.5 |" in text
    assert "- tests/b/test_z.py: 1 of 3 failed\n" in text


def make_commit(root: Path, **files: str) -> str:
    for name, text in files.items():
        (root / name.replace("__", "/")).with_suffix(".py").write_text(text)
    settings = ["-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run(["git", *settings, "add", "-A"], cwd=root, check=True)
    subprocess.run(["git", *settings, "commit", "-qm", "x"], cwd=root, check=True)
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()


def test_results_hold_while_only_other_test_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "STATE", tmp_path / ".git" / "soak")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "tests").mkdir()
    first = make_commit(tmp_path, tests__test_x="1", tests__test_y="1", source="1")
    soak.STATE.mkdir()
    passed = {"tests": 1, "failed": 0, "skipped": 0, "seconds": 1}
    (soak.STATE / f"{first}.json").write_text(
        json.dumps({"tests/test_x.py": passed, "tests/test_y.py": {**passed, "failed": 1}})
    )
    second = make_commit(tmp_path, tests__test_y="2")
    assert soak.reuse(second) == (first, {"tests/test_x.py": passed})
    assert f"Only tests differ from commit {first}." in page(second, {"tests/test_x.py": passed}, base=first)
    assert soak.reuse(make_commit(tmp_path, source="2")) == ("", {})


def test_committed_counts_let_another_machine_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "STATE", tmp_path / ".git" / "soak")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    first = make_commit(tmp_path, tests__test_x="1", tests__test_y="1", source="1")
    passed = {"tests": 1, "failed": 0, "skipped": 0, "seconds": 1}
    soak.write_counts(first, {"tests/test_x.py": passed, "tests/test_y.py": passed})
    second = make_commit(tmp_path, tests__test_y="2")
    assert soak.reuse(second) == (first, {"tests/test_x.py": passed})
    assert soak.reuse(make_commit(tmp_path, source="2")) == ("", {})


def test_a_changed_helper_repeats_its_folder_and_the_files_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    for name, text in {"a/test_x": "", "b/test_y": "import helper", "b/test_z": "helper_of_another"}.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).with_suffix(".py").write_text(text)
    found = {
        test: soak.depends(f"tests/{test}.py", "tests/a/helper.py") for test in ("a/test_x", "b/test_y", "b/test_z")
    }
    assert found == {"a/test_x": True, "b/test_y": True, "b/test_z": False}
    assert not soak.depends("tests/a/test_x.py", "tests/a/test_w.py")


def test_a_file_that_hangs_is_killed_and_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "FILE_SECONDS", 3.0)
    file = tmp_path / "test_hangs.py"
    file.write_text("import time\n\n\ndef test_it():\n    time.sleep(600)\n")
    counts = soak.run(soak.Part(str(file), 1, 1, (str(file),)), {"FAULTS_JSON": tmp_path / "faults.jsonl"})
    assert (counts["tests"], counts["failed"]) == (1, 1)
    assert counts["seconds"] < 60


def test_the_page_names_the_files_that_have_not_run():
    one = {"tests": 1, "failed": 0, "skipped": 0, "seconds": 1}
    text = page("abc1234", {"tests/a/test_x.py": one}, missing=["tests/b/test_z.py"])
    assert text.endswith("Not run yet: tests/b/test_z.py.\n")
    assert "Not run yet" not in page("abc1234", {"tests/a/test_x.py": one})


def test_long_files_run_in_parts_whose_results_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "tests/test_long.py"
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "LONGEST", (name,))
    (tmp_path / "tests").mkdir()
    numbers = f"range({soak.PART_TESTS + 3})"
    (tmp_path / name).write_text(
        f"import pytest\n\n@pytest.mark.parametrize('n', {numbers})\ndef test_it(n):\n    assert n != 2\n"
    )
    parts = soak.list_parts(name)
    assert [part.name for part in parts] == [f"{name} part 1 of 2", f"{name} part 2 of 2"]
    results: dict[str, soak.Counts] = {}
    (tmp_path / "docs").mkdir()
    soak.soak(parts, results, tmp_path / "abc.json", {}, parallel=2)
    assert [results[part.name]["tests"] for part in parts] == [soak.PART_TESTS, 3]
    assert [results[part.name]["failed"] for part in parts] == [1, 0]
    assert {soak.find_file(item) for item in json.loads((tmp_path / "docs/soak.json").read_text())["files"]} == {name}
    assert f"- {name} part 1 of 2: 1 of {soak.PART_TESTS} failed\n" in page("abc", results)


def test_the_parts_of_a_long_file_have_its_tests():
    parts = soak.list_parts("tests/ownership/test_divided_models.py")
    assert len(parts) > 1
    assert all(test.startswith("tests/ownership/test_divided_models.py::") for part in parts for test in part.tests)
    assert sum(len(part.tests) for part in parts) > 400


def test_the_longest_files_exist():
    assert all((soak.ROOT / name).exists() for name in (*soak.LONGEST, *soak.MATRICES, soak.DATABASE, *soak.PUBLISHED))
