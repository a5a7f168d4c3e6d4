"""`--json` of all commands: destinations, the fields that all results share, and the schemas in the documentation."""

import argparse
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import msgspec
import pytest
from support.json_schema import SCHEMAS, check_result, find_errors
from support.warm_runs import rankless

from docs.extensions.json_schemas import format_schema, make_schemas
from rankless.cli.json_output import (
    JsonDestination,
    add_json_option,
    encode_json,
    make_json_header,
    read_json_destination,
)
from rankless.config.run_config import Program
from rankless.errors import ConfigError


class Content(msgspec.Struct, frozen=True, kw_only=True):
    loss: float


def parse(*words: str, file_is_optional: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_json_option(parser, "the result", file_is_optional=file_is_optional)
    return parser.parse_args(words)


@pytest.mark.parametrize("command", sorted(make_schemas()))
def test_the_schema_in_the_documentation_is_that_of_the_source(command: str) -> None:
    committed = (SCHEMAS / f"{command}.schema.json").read_text()
    assert committed == format_schema(make_schemas()[command]), "run: python docs/extensions/json_schemas.py"


def test_the_documentation_has_no_other_schemas_and_includes_each() -> None:
    assert sorted(file.name.partition(".")[0] for file in SCHEMAS.iterdir()) == sorted(make_schemas())
    page = (SCHEMAS.parent / "json.md").read_text()
    assert [name for name in make_schemas() if f"schemas/{name}.schema.json" not in page] == []


@pytest.mark.parametrize(
    ("program", "script"),
    [
        (Program(kind="script", target="train.py", arguments=("--lr", "1")), "train.py"),
        (Program(kind="module", target="package.train"), "-m package.train"),
        (Program(kind="code", target="import rankless"), "-c import rankless"),
        (None, None),
    ],
)
def test_every_result_starts_with_the_same_fields(program: Program | None, script: str | None) -> None:
    result = json.loads(encode_json(make_json_header("plan", program, seed=3), Content(loss=float("nan"))))
    assert list(result) == ["version", "rankless", "command", "script", "arguments", "seed", "loss"]
    assert (result["version"], result["command"], result["script"], result["seed"]) == (1, "plan", script, 3)
    assert result["arguments"] == ([] if program is None else list(program.arguments))
    assert result["loss"] is None


def test_a_dash_prints_the_json_alone_and_a_file_gets_it_beside_the_text(tmp_path: Path) -> None:
    for path, expected in (("-", ""), (str(tmp_path / "result.json"), "text\n"), (None, "text\n")):
        out, err = io.StringIO(), io.StringIO()
        destination = JsonDestination(path=path)
        with redirect_stdout(out), redirect_stderr(err):
            with destination.reserve_standard_output():
                print("text")
            destination.write(make_json_header("plan"), Content(loss=1.0))
        if path == "-":
            assert json.loads(out.getvalue())["loss"] == 1.0
            assert err.getvalue() == "text\n"
        else:
            assert (out.getvalue(), err.getvalue()) == (expected, "")
    assert json.loads((tmp_path / "result.json").read_text())["loss"] == 1.0


def test_only_a_command_without_a_program_takes_json_without_a_file() -> None:
    assert read_json_destination(parse("--json", file_is_optional=True)).is_standard_output
    assert read_json_destination(parse("--json", "-")).is_standard_output
    assert read_json_destination(parse()).path is None
    with pytest.raises(SystemExit), redirect_stderr(io.StringIO()):
        parse("--json")


@pytest.mark.parametrize("path", ["train.py", "absent/result.json", "folder"])
def test_a_destination_that_would_fail_at_the_end_is_refused_at_the_start(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("precious")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="expected: --json FILE"):
        read_json_destination(parse("--json", path))
    for command in ("plan", "doctor"):
        done = rankless(command, "--json", path, *(["train.py"] if command == "plan" else []), folder=tmp_path)
        assert done.returncode == 2
        assert "expected: --json FILE" in done.stderr
    assert (tmp_path / "train.py").read_text() == "precious"


def test_the_validator_finds_every_kind_of_difference() -> None:
    schema = make_schemas()["doctor"]
    right = {
        **{"version": 1, "rankless": "1", "command": "doctor", "script": None, "arguments": [], "seed": None},
        **{"verdict": "", "causes": [], "warnings": 0, "checks": 0, "not_looked_at": [], "rows": []},
    }

    def errors(**changes: object) -> list[str]:
        return find_errors({**right, **changes}, schema, schema["$defs"], "result", closed=True)

    assert errors() == []
    assert errors(version=2)
    assert errors(command="plan")
    assert errors(warnings="none")
    assert errors(warnings=True)
    assert errors(script=3)
    assert errors(added=3)
    assert errors(rows=[{"name": "a", "seen": "b", "status": "unknown"}])
    assert errors(causes=[{"seen": "a", "fix": "b"}])
    without = {name: value for name, value in right.items() if name != "checks"}
    assert find_errors(without, schema, schema["$defs"], "result", closed=True) == ["result: no 'checks'"]


@pytest.mark.slow
def test_doctor_writes_the_documented_json_to_a_file_beside_the_table(tmp_path: Path) -> None:
    done = rankless("doctor", "--quick", "--json", "doctor.json", folder=tmp_path)
    result = check_result((tmp_path / "doctor.json").read_text(), "doctor")
    assert done.stdout.splitlines()[0] == "this host"
    assert result["verdict"] in done.stdout
    assert (result["script"], result["arguments"], result["seed"]) == (None, [], None)
