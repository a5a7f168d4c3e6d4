"""How Rankless was installed, and so the command that installs one of its extras. Imports no torch."""

import re
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder that holds the package. It is a checkout if Rankless runs from there without an installation."""


class _CheckoutInfo(msgspec.Struct, frozen=True):
    editable: bool = False


class _Repository(msgspec.Struct, frozen=True):
    vcs: str
    commit_id: str


class _DirectUrl(msgspec.Struct, frozen=True):
    """What pip records in `direct_url.json` of an installation that does not come from a package index."""

    url: str
    dir_info: _CheckoutInfo = _CheckoutInfo()
    vcs_info: _Repository | None = None


def format_install_command(extra: str = "", *, pip: str = "pip") -> str:
    """Return the command that installs Rankless, or one of its extras, from the source of this installation.

    That is a package index, a checkout, a wheel or a repository. If a wheel or a checkout is gone, the command installs
    the packages of the extra.

    Args:
        extra: The name of the extra, such as "ps". Default: none.
        pip: How to call pip.

    Example:
        >>> format_install_command("ps").startswith("pip install ")
        True
    """
    source = _read_source()
    brackets = f"[{extra}]" if extra else ""
    if source is None:
        return f'{pip} install "rankless{brackets}"'
    address = urlsplit(source.url)
    if address.scheme == "file":
        path = Path(unquote(address.path))
        if extra and not path.exists():
            return " ".join([pip, "install", *(f'"{requirement}"' for requirement in _list_requirements(extra))])
        return f'{pip} install {"--editable " * source.dir_info.editable}"{path}{brackets}"'
    url = source.url
    if source.vcs_info is not None:
        url = f"{source.vcs_info.vcs}+{url}@{source.vcs_info.commit_id}"
    return f'{pip} install "rankless{brackets} @ {url}"'


def _read_source() -> _DirectUrl | None:
    """Return the source of this installation; None for a package index."""
    try:
        text = metadata.distribution("rankless").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return _DirectUrl(CHECKOUT.as_uri()) if (CHECKOUT / "pyproject.toml").is_file() else None
    return msgspec.json.decode(text, type=_DirectUrl) if text else None


def _list_requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, such as "numba>=0.62"."""
    marker = re.compile(rf"""; *extra *== *["']{extra}["'] *$""")
    requirements = metadata.distribution("rankless").requires or []
    return [marker.sub("", text).strip() for text in requirements if marker.search(text)]
