"""What a browser shows of pictures of plans: no text overlaps, nothing is cut off, and all text is legible."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, start_browser
from support.plan_records import data_parallel, divided, many_modules, pipelined

from rankless.plan_picture.picture_file import write_picture

MEASURE = """
(() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = colour => {
    const [r, g, b] = channels(colour).map(value => value / 255)
      .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const background = (x, y, inPicture) => {
    for (const element of document.elementsFromPoint(x, y)) {
      const style = getComputedStyle(element);
      if (element.tagName === 'rect') return style.fill;
      if (!inPicture && style.backgroundColor !== 'rgba(0, 0, 0, 0)') return style.backgroundColor;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = {texts: [], clipped: [], faint: []};
  for (const element of document.querySelectorAll('svg text, h1, p, caption, th, td')) {
    const inPicture = element.tagName === 'text';
    const box = element.getBoundingClientRect();
    if (!element.textContent.trim()) continue;
    const text = (inPicture ? element.firstChild.data : element.textContent).slice(0, 60);
    found.texts.push([text, box.left, box.top, box.right, box.bottom]);
    const frame = inPicture ? element.ownerSVGElement.getBoundingClientRect()
      : {left: 0, top: 0, right: innerWidth, bottom: innerHeight};
    if (box.left < frame.left || box.top < frame.top || box.right > frame.right || box.bottom > frame.bottom
        || element.scrollWidth > element.clientWidth + 1 && !inPicture) found.clipped.push(text);
    const style = getComputedStyle(element);
    for (const part of [0.02, 0.5, 0.98]) {
      const x = box.left + part * box.width, y = (box.top + box.bottom) / 2;
      const ratio = contrast(inPicture ? style.fill : style.color, background(x, y, inPicture));
      if (ratio < 4.5) found.faint.push([text, ratio]);
    }
  }
  found.width = document.documentElement.scrollWidth;
  return found;
})()
"""
PLANS = {
    "data": data_parallel,
    "zero": lambda: divided(7, kinds=("optimizer_state",)),
    "64-workers": lambda: divided(64),
    "pipeline": lambda: pipelined({"pipeline": 2, "data": 2}),
    "zero-bubble": lambda: pipelined({"pipeline": 4}, schedule="zero-bubble"),
    "interleaved": lambda: pipelined({"pipeline": 2}, schedule="interleaved", microbatches=20),
    "names": lambda: divided(2, many_modules()),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a browser for all tests of this file."""
    with start_browser() as browser:
        yield browser


def find_overlaps(texts: list[tuple[str, float, float, float, float]]) -> list[tuple[str, str]]:
    """Return the texts whose boxes overlap by more than a pixel, of which fonts leave that much empty."""
    return [
        (one[0], other[0])
        for number, one in enumerate(texts)
        for other in texts[:number]
        if min(one[3], other[3]) - max(one[1], other[1]) > 1 and min(one[4], other[4]) - max(one[2], other[2]) > 1
    ]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["svg", "html"])
@pytest.mark.parametrize("name", PLANS)
def test_all_texts_are_legible_in_light_and_dark(browser: Browser, tmp_path: Path, name: str, ending: str):
    file = tmp_path / f"{name}.{ending}"
    write_picture(str(file), PLANS[name]())
    for scheme in ("light", "dark"):
        browser.open(file, scheme)
        found = browser.evaluate(MEASURE)
        assert len(found["texts"]) > 20
        assert found["clipped"] == []
        assert found["faint"] == []
        assert find_overlaps(found["texts"]) == []
        assert found["width"] <= 1320


@pytest.mark.slow
def test_the_colours_follow_the_preferred_scheme(browser: Browser, tmp_path: Path):
    file = tmp_path / "plan.svg"
    write_picture(str(file), data_parallel())
    papers = []
    for scheme in ("light", "dark"):
        browser.open(file, scheme)
        papers.append(browser.evaluate("getComputedStyle(document.querySelector('rect')).fill"))
    assert papers == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]


@pytest.mark.slow
def test_a_screen_reader_finds_a_picture_with_its_name_and_tables(browser: Browser, tmp_path: Path):
    file = tmp_path / "plan.html"
    write_picture(str(file), pipelined({"pipeline": 2, "data": 2}))
    browser.open(file)
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {}
    for node in nodes:
        roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    (picture,) = roles.get("image", roles.get("img", []))
    assert picture.startswith("train job train (train.py:12)")
    assert len(roles["table"]) == 6
    assert "what moves per call" in roles["table"]
    assert {"columnheader", "rowheader"} <= roles.keys()
