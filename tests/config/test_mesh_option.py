"""The mesh on a command line: what is read, and what is refused before any process starts."""

from pathlib import Path

import pytest
from support.warm_runs import rankless

from rankless.config.make_run_config import choose_mesh
from rankless.config.mesh_option import count_workers, format_mesh, parse_mesh
from rankless.errors import ConfigError


def test_axes_are_arranged_by_what_they_send_and_not_as_they_are_named():
    axes = parse_mesh("data=3, pipeline=2")
    assert axes == parse_mesh("pipeline=2,data=3")
    assert [(axis.name, axis.role, axis.size) for axis in axes] == [("pipeline", "pipeline", 2), ("data", "data", 3)]
    assert [axis.name for axis in parse_mesh("tensor=2,data=3")] == ["data", "tensor"]
    assert [axis.name for axis in parse_mesh("tensor=2,data=3,pipeline=4")] == ["pipeline", "data", "tensor"]
    assert [axis.name for axis in parse_mesh("tensor=2,sequence=2,data=3")] == ["data", "sequence", "tensor"]
    assert count_workers(axes) == 6
    assert format_mesh(axes) == "pipeline=2,data=3"


@pytest.mark.parametrize("text", ["", "pipeline", "pipeline=", "pipeline=0", "pipeline=-1", "experts=2", "data=2;x=1"])
def test_what_names_no_mesh_is_refused(text):
    with pytest.raises(ConfigError, match="axes as name=size"):
        parse_mesh(text)


def test_an_axis_has_one_size():
    with pytest.raises(ConfigError, match="data twice in --mesh data=2,data=2"):
        parse_mesh("data=2,data=2")


def test_a_mesh_has_the_workers_of_the_run():
    assert choose_mesh((), None, 5) == ()
    with pytest.raises(ConfigError, match="6 workers, the product of the axes of the mesh pipeline=2,data=3"):
        choose_mesh(parse_mesh("data=3,pipeline=2"), None, 4)


@pytest.mark.parametrize("command", ["run", "plan", "verify"])
def test_each_command_refuses_another_number_of_workers_before_it_runs(tmp_path: Path, command: str):
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')")
    found = rankless(command, "-n", "3", "--mesh", "pipeline=2", "train.py", folder=tmp_path)
    assert found.returncode == 2
    assert "expected: 2 workers, the product of the axes of the mesh pipeline=2\nfound:    3" in found.stderr
    assert "must not run" not in found.stdout + found.stderr
    assert not (tmp_path / "log").exists()
