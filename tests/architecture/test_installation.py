"""The command that installs an extra names the source from which Rankless was installed."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from rankless import install_command
from rankless.install_command import format_install_command


class Installed:
    """A distribution as pip records it."""

    def __init__(self, direct_url: dict[str, object] | None) -> None:
        self.direct_url = direct_url
        self.requires = [
            "numpy>=1.26",
            'numba>=0.62; extra == "ps"',
            'pyzmq>=27; extra == "ps"',
            'tqdm>=4.60; extra == "examples"',
        ]

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.direct_url is None else json.dumps(self.direct_url)


SOURCES = {
    "index": (None, 'pip install "rankless[ps]"'),
    "checkout": ({"url": "file://HERE", "dir_info": {}}, 'pip install "HERE[ps]"'),
    "editable": ({"url": "file://HERE", "dir_info": {"editable": True}}, 'pip install --editable "HERE[ps]"'),
    "folder with a space": ({"url": "file://HERE/my%20code", "dir_info": {}}, 'pip install "HERE/my code[ps]"'),
    "wheel": ({"url": "file://HERE/rankless.whl", "archive_info": {}}, 'pip install "HERE/rankless.whl[ps]"'),
    "wheel that is gone": (
        {"url": "file://HERE/other.whl", "archive_info": {}},
        'pip install "numba>=0.62" "pyzmq>=27"',
    ),
    "repository": (
        {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
        'pip install "rankless[ps] @ git+https://example.org/r.git@abc"',
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_command_names_the_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record, command = SOURCES[name]
    (tmp_path / "my code").mkdir()
    (tmp_path / "rankless.whl").touch()
    here = None if record is None else json.loads(json.dumps(record).replace("HERE", str(tmp_path)))
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(here))
    assert format_install_command("ps") == command.replace("HERE", str(tmp_path))


def test_a_checkout_that_nobody_installed_names_itself(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert format_install_command("ps") == f'pip install "{install_command.CHECKOUT}[ps]"'
    assert format_install_command(pip="python -m pip") == f'python -m pip install "{install_command.CHECKOUT}"'
    assert (install_command.CHECKOUT / "pyproject.toml").is_file()
