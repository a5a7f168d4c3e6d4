"""Make the file of a picture, as SVG or as a page."""

from pathlib import Path
from typing import Literal

from rankless.errors import ConfigError
from rankless.plan_picture.html_page import format_page
from rankless.plan_picture.job_picture import draw_plan, summarize
from rankless.plan_picture.pictured_job import PicturedPlan
from rankless.plan_picture.svg import format_svg

PictureFormat = Literal["svg", "html"]


def find_format(path: str) -> PictureFormat | None:
    """Return the format of a file by its extension; None for another one."""
    endings: dict[str, PictureFormat] = {".svg": "svg", ".html": "html"}
    return endings.get(Path(path).suffix.lower())


def format_picture(plan: PicturedPlan, form: PictureFormat) -> str:
    """Return the text of a picture's file."""
    if form == "html":
        return format_page(plan)
    texts = [f"{job.title}: {summarize(job)}" for job in plan.jobs]
    return format_svg(
        draw_plan(plan), title=f"Parallel plan of {plan.script}", description=". ".join([*texts, *plan.others])
    )


def write_picture(path: str, plan: PicturedPlan) -> None:
    """Write a picture to a file, whose extension says the format. Raises `ConfigError` if that fails."""
    form = find_format(path)
    assert form is not None, f"{path} was not checked"
    try:
        Path(path).write_text(format_picture(plan, form), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            expected=f"to write the picture to {path}",
            found=error.strerror,
            fix="name a file that you may write",
        ) from error
