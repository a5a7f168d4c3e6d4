"""Every launcher package has a profile; a plain `rankless run` loads none of them."""

import importlib
import inspect
import re
from pathlib import Path

import msgspec
import pytest
from support.jobs import rankless

from rankless.config.extensions import list_extensions
from rankless.config.run_config import LauncherSpec, RunRequest, decode_settings, make_launcher_spec
from rankless.errors import LaunchError
from rankless.extensions.fleetrun.profile import FleetrunSettings, make_fleetrun_spec
from rankless.extensions.horovodrun.settings import HorovodrunSettings, NamedHost, make_horovodrun_spec
from rankless.extensions.torchrun.profile import ShownStream, TorchrunSettings, make_torchrun_spec
from rankless.launch.launcher_profile import LauncherProfile, load_profile

NAMES = [extension.name for extension in list_extensions() if extension.launcher]
CHOICES = {
    "torchrun": make_torchrun_spec(TorchrunSettings(streams=(ShownStream(rank=0, source="out"),))),
    "fleetrun": make_fleetrun_spec(FleetrunSettings(shares=((0, 1), (2,)))),
    "horovodrun": make_horovodrun_spec(HorovodrunSettings(hosts=(NamedHost(name="a", slots=2),))),
}
MEMBERS = [name for name in vars(LauncherProfile) if not name.startswith("_")]


def signature(owner: type, name: str) -> list[tuple[str, object, object]]:
    member = inspect.getattr_static(owner, name)
    function = member.fget if isinstance(member, property) else member
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_package_has_a_profile_that_satisfies_the_protocol(name: str):
    profile = load_profile(CHOICES[name])
    assert type(profile).__module__ == f"rankless.extensions.{name}.profile"
    assert LauncherProfile in type(profile).__mro__
    own = [member for member in vars(type(profile)) if not member.startswith("_") and member != "settings"]
    assert set(own) <= set(MEMBERS)
    for member in MEMBERS:
        is_property = isinstance(inspect.getattr_static(LauncherProfile, member), property)
        assert isinstance(inspect.getattr_static(type(profile), member), property) is is_property
        if is_property or callable(getattr(LauncherProfile, member)):
            assert signature(type(profile), member) == signature(LauncherProfile, member), member


@pytest.mark.parametrize("name", [None, *NAMES])
def test_the_option_that_a_failure_report_advises_exists(name: str | None, tmp_path: Path):
    option = load_profile(None if name is None else CHOICES[name]).plain_process_option
    help_text = rankless(name or "run", "--help", folder=tmp_path).stdout
    assert help_text.startswith("usage: ")
    assert option is None or option.split()[0] in help_text


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_of_a_launcher_travels_between_hosts(name: str):
    request = RunRequest(worker_count=2, launcher=CHOICES[name])
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(request), type=RunRequest) == request


def test_settings_survive_as_the_structs_of_their_launcher():
    settings = FleetrunSettings(job_id="x", shares=((0, 1), (2,)), first_port=7000)
    assert decode_settings(make_launcher_spec("fleetrun", settings).settings, FleetrunSettings) == settings


@pytest.mark.parametrize("name", ["mpirun", "option_spellings", "torchrun.options", "../x", "os", "", "torchrun\n"])
def test_a_name_that_is_no_launchers_reaches_no_module(name: str, monkeypatch: pytest.MonkeyPatch):
    imported: list[str] = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda module: imported.append(module) or real(module))
    with pytest.raises(LaunchError, match="a launcher that this Rankless has"):
        load_profile(LauncherSpec(name=name, settings=b"{}"))
    assert [module for module in imported if module != "importlib.metadata"] == []


def test_without_a_launcher_the_profile_is_that_of_a_plain_run():
    assert type(load_profile(None)) is LauncherProfile


SCRIPT = "import sys; print(*(name for name in sys.modules if name.startswith('rankless.')))"


def is_launchers(module: str) -> bool:
    return module.startswith("rankless.extensions")


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--no-warm",)], ids=["forked", "plain processes"])
def test_a_plain_run_executes_no_code_of_another_launcher(words: tuple[str, ...], tmp_path: Path):
    """Each worker prints its modules; the interpreters of the agent and the fork server write what they execute."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = ("run", "-n", "2", *words, "train.py")
    done = rankless(*run, folder=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = tmp_path / "log/latest"
    texts = {
        "agent": done.stderr,
        **{name: (logs / f"{name}.log").read_text() for name in ("parent", "rank0", "rank1")},
    }
    found = {process: set(re.findall(r"\brankless\.[\w.]*\w", text)) for process, text in texts.items()}
    assert "rankless.launch.agent" in found["agent"]
    assert "rankless.runtime.fork_server" in found["parent"]
    assert "rankless.runtime.worker" in found["rank0"] & found["rank1"]
    assert not {name: executed for name in found if (executed := sorted(filter(is_launchers, found[name])))}
