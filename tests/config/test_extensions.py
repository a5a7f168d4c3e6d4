"""Extensions are found by their declarations, also those of other packages, without importing anything of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankless.config import extensions
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Program, RunRequest
from rankless.errors import ConfigError

DECLARATION = """
launcher = "other.profile"
variables = ["OTHER_"]

[commands.otherrun]
help = "Run a script of the other system."
module = "other.command"

[stacks.labels]
"waits.py" = "other.wait"
"""
COMMAND = """
NAME, HELP = "otherrun", "Run a script of the other system."

def add_arguments(parser):
    parser.add_argument("--number", type=int, help="A number.")

def run(arguments):
    print("number", arguments.number)
    return 3
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with an installed package `other`, which has an extension of that name."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "other/extension.toml").write_text(DECLARATION)
    information = tmp_path / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rankless.extensions]\nother = other\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (
        extensions.find_extension,
        extensions.list_extensions,
        extensions._list_installed,
        extensions._read_installed,
    ):
        cached.cache_clear()


def test_an_extension_of_another_package_is_found_without_an_import(installed: Path):
    found = extensions.find_extension("other")
    assert found is not None
    assert (found.name, found.folder, found.launcher) == ("other", str(installed / "other"), "other.profile")
    assert found.commands == {
        "otherrun": extensions.Command(help="Run a script of the other system.", module="other.command")
    }
    assert found.stacks.labels == {"waits.py": "other.wait"}
    assert found in extensions.list_extensions()
    assert extensions.find_command("otherrun") == found.commands["otherrun"]
    assert "other" not in sys.modules


def test_its_command_is_one_of_rankless(installed: Path):
    (installed / "other/__init__.py").write_text("")
    (installed / "other/command.py").write_text(COMMAND)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rankless", *words]
        return subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=60)

    done = call("otherrun", "--number", "7")
    assert (done.returncode, done.stdout) == (3, "number 7\n"), done.stderr
    assert "Run a script of the other system." in call("--help").stdout
    assert "--number" in call("help", "otherrun").stdout
    assert "did you mean otherrun?" in call("otherru").stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("launcher = ", "Invalid value"),
        ("lancher = 'other.profile'", "unexpected keyword argument 'lancher'"),
        ("[commands.otherrun]\nhelp = 'Help.'", "missing 1 required keyword-only argument: 'module'"),
        ("[stacks]\nwait = ['a']", "unexpected keyword argument 'wait'"),
        ("stacks = 3", "no attribute 'items'"),
        ("variables = 'OTHER_'", "variables = 'OTHER_'"),
        ("variables = [3]", "variables = (3,)"),
        ("launcher = 3", "launcher = 3"),
        ("[failures]\nsecondary = ['(']", "unterminated subpattern"),
        ("[options.Log_Dir]\nhelp = 'A folder.'", "options.'Log_Dir', which is no name of an option"),
        ("[options.log]\nhelp = 'A folder.'\ntype = 'path'", "type = 'path', which is none of text"),
        ("[role]\nmodule = 'other.role'", "missing 2 required keyword-only arguments: 'title' and 'process'"),
        ("[failures]\nstalled = 'no group'", "has not two groups"),
        ("[failures]\nlost = 'no group'", "has not one group"),
        ("[[files]]\nname = 'log'\npattern = '*.log'\nmode = '0600'", "mode = '0600'"),
    ],
)
def test_a_wrong_declaration_names_the_file_and_the_field(text: str, found: str, installed: Path):
    (installed / "other/extension.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        extensions.find_extension("other")
    assert str(installed / "other/extension.toml") in str(raised.value.expected)
    assert found in str(raised.value.found)
    assert "other" not in [extension.name for extension in extensions.list_extensions()]
    assert [str(problem) for problem in extensions.list_problems()] == [str(raised.value)]


def test_an_unknown_command_names_an_extension_that_cannot_be_read(installed: Path):
    (installed / "other/extension.toml").write_text("lancher = 'other.profile'")
    command = [sys.executable, "-m", "rankless", "otherrun"]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unknown command otherrun" in done.stderr
    assert "unexpected keyword argument 'lancher'" in done.stderr


@pytest.mark.parametrize("name", ["", "..", "a/b", "torchrun.profile", "nobody"])
def test_a_name_of_no_extension_is_none(name: str):
    assert extensions.find_extension(name) is None


def test_an_installed_package_does_not_replace_an_extension_of_rankless(installed: Path):
    (installed / "other-1.0.dist-info/entry_points.txt").write_text("[rankless.extensions]\ntorchrun = other\n")
    found = extensions.find_extension("torchrun")
    assert found is not None
    assert found.launcher == "rankless.extensions.torchrun.profile"
    assert [each.name for each in extensions.list_extensions()].count("torchrun") == 1


def test_options_of_an_extension_that_a_host_lacks_are_refused_there():
    """Host 0 sends its request to the other hosts."""
    request = RunRequest(worker_count=1, options={"nobody": {"clocks": 1}})
    with pytest.raises(ConfigError, match="install it here too"):
        make_run_config(Program(kind="code", target="pass"), request)
