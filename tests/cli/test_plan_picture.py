"""`rankless plan --picture`: what is refused before anything runs, and pictures of real runs."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.warm_runs import rankless

SCRIPT = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
names = ["first", "a<b>&\\"c\\"", "注意", "x" * 200, "last"]
model = torch.nn.Sequential()
for name in names:
    model.add_module(name, torch.nn.Linear(8, 8))
model.register_parameter("unused", torch.nn.Parameter(torch.zeros(3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(images, labels):
    return F.cross_entropy(model(images), labels)

@rankless.job(model=model)
def predict(images):
    return model(images)

train(torch.randn(8, 8), torch.randint(0, 8, (8,)))
"""
SVG = "{http://www.w3.org/2000/svg}"
MARKER = "import pathlib; pathlib.Path('started').touch()"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--picture", "plan.png"), "'plan.png'"),
        (("--picture", "plan"), "'plan'"),
        (("--picture", "-"), "'-'"),
        (("--picture", ""), "''"),
        (("--picture", ".svg"), "'.svg'"),
        (("--picture", "train.py"), "'train.py'"),
        (("--picture", "missing/plan.svg"), "missing/plan.svg"),
        (("--picture", "folder.svg"), "folder.svg"),
        (("--picture", "plan.svg/plan.html"), "plan.svg/plan.html"),
        (("--picture", "plan.svg", "--json", "./plan.svg"), "./plan.svg for --picture and --json"),
        (("--picture", "plan.svg", "--save", "plan.svg"), "plan.svg for --picture and --save"),
        (("--picture", "link.html", "--save", "target.html"), "target.html for --picture and --save"),
        (("--picture", "/proc/plan.svg"), "/proc/plan.svg"),
        (("--picture", "x" * 300 + ".svg"), f"{'x' * 300}.svg: File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_script_runs(
    options: tuple[str, ...], found: str, tmp_path: Path
):
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    done = rankless("plan", "--devices", "cpu", *options, "-c", MARKER, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "expected: " in done.stderr
    assert f"found:    {found}" in done.stderr
    assert "fix:      " in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("axes", ["data=2", "pipeline=2"])
def test_the_picture_has_the_plan_of_the_script(axes: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = rankless("plan", "--devices", "cpu", "--mesh", axes, "--picture", "Plan.SVG", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    root = ElementTree.fromstring((tmp_path / "Plan.SVG").read_bytes())
    assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg",
        "title",
        "desc",
        "style",
        "rect",
        "text",
    }
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "train job train (train.py:13)" in texts
    assert "job predict (train.py:17) was not called" in texts
    assert f"Mesh: {axes.replace('=', ' ')}" in texts
    assert {'model.a<b>&"c"', "model.注意", "model.first"} <= set(texts)
    assert any("x" * 200 in (element.text or "") for element in root.iter(f"{SVG}title"))
    assert {"model", "12 B"} <= set(texts)  # of the parameter that nothing uses
    assert any(text.startswith("Schedule ") for text in texts) == (axes == "pipeline=2")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_page_and_json_on_standard_output_go_together(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--devices", "cpu", "--json", "-", "--picture", "plan.html")
    done = rankless("plan", *options, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("{")
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    assert "a&lt;b&gt;&amp;" in page
    assert page.count("<section") == page.count("<svg") == 1
