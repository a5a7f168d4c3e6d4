"""An environment with rankless-oneflow, as pip would install it, and the scripts of OneFlow's own pages."""

import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages/rankless-oneflow"
PAGES = [*ROOT.parents[0].glob("shared/seeds/004_*.txt"), *ROOT.parents[1].glob("shared/seeds/004_*.txt")]
"""OneFlow's page on its two views, where it lies beside the repository, or beside the folder of its worktrees."""


def make_environment(folder: Path) -> Path:
    """Return the Python of a new environment in `folder`, with our packages, Rankless and rankless-oneflow."""
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    place = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(place.stdout.strip())
    (site / "lent.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    shutil.copytree(PACKAGE / "source", site, dirs_exist_ok=True)
    information = site / "rankless_oneflow-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rankless-oneflow\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text("[rankless.extensions]\noneflow = rankless_oneflow\n")
    return python


def read_page_scripts() -> dict[str, str]:
    """Return the complete scripts of OneFlow's page on its two views, by view; none where the page is not at hand."""
    found: dict[str, str] = {}
    for page in PAGES:
        for script in re.findall(r"^import numpy as np\nimport oneflow.*?(?=^代码解析)", page.read_text(), re.M | re.S):
            found["mirrored" if "ListNumpy" in script else "consistent"] = script
    return found
