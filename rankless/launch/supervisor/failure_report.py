"""What a report says about a failure: the cause in the user's words, the line of the script, and the whole text.

Only a run in which something fails loads this.
"""

from collections.abc import Sequence

from rankless.launch.supervisor.start_and_end_text import MAX_LINE_CHARS, MAX_SECONDARY_LINES
from rankless.launch.supervisor.verdict_types import SecondaryFailure, Verdict
from rankless.launch.watchdog.stack_classifier import find_script_folder, format_line
from rankless.launch.watchdog.stacks import TRACEBACK_FRAME, parse_traceback
from rankless.records.events import GroupTeardown, Raised
from rankless.records.number_formatting import format_count
from rankless.user_code import is_library, shorten_path

_TRACEBACK_LINES = 9
_IN_CALLBACK = "Got the following error when running the callback: "
"""How PyTorch's futures begin an error's text, such as that of a collective in DistributedDataParallel's backward."""


def first_line(record: Raised | GroupTeardown) -> str:
    """Return the type of the exception that is the cause, and the first line of its message."""
    _, found, inner = record.message.rpartition(_IN_CALLBACK)
    if found:
        kind, _, message = inner.partition(":")
        return _join(kind, message)
    if record.cause:
        return record.cause
    return _join(record.error_type, record.message)


def _join(kind: str, message: str) -> str:
    line = (message.strip().splitlines() or [""])[0]
    return f"{kind}: {line[:200]}" if line else kind


def find_line(record: Raised | GroupTeardown) -> str:
    """Return the innermost line of the script, like "train.py:33", or "" if there is none."""
    if not record.line:
        return find_script_line(record.traceback)
    file, _, number = record.line.rpartition(":")
    return f"{shorten_path(file)}:{number}"


def find_script_line(traceback: str) -> str:
    """Return the innermost line of the script in a traceback, like "train.py:33", or "" if there is none."""
    own = [frame for frame in parse_traceback(traceback) if not is_library(frame.file)]
    return format_line(own[-1], find_script_folder(own)) if own else ""


def shorten_traceback(traceback: str, *, limit: int) -> list[str]:
    """Return the last lines of a traceback, after those of the script's innermost frame if that is further out.

    Args:
        traceback: The text of the traceback.
        limit: How many lines to return at most, without the lines that say "...".
    """
    lines = traceback.rstrip().splitlines()
    if len(lines) <= limit:
        return lines
    frames = [number for number, line in enumerate(lines) if _is_script_frame(line)]
    if not frames or frames[-1] >= len(lines) - limit:
        return ["...", *lines[-limit:]]
    start = frames[-1]
    end = next((number for number in range(start + 1, len(lines)) if not lines[number].startswith("    ")), start + 1)
    script = lines[start : min(end, start + 3)]
    return ["...", *script, "  ...", *lines[len(script) - limit :]]


def _is_script_frame(line: str) -> bool:
    found = TRACEBACK_FRAME.match(line)
    return found is not None and not found[1].startswith("<") and not is_library(found[1])


def format_failure(
    verdict: Verdict, *, log_file: str, host: str = "", report: str = "", with_traceback: bool = True
) -> str:
    """Return at most 15 lines about the root cause of a failure.

    They name the rank or server, its host, what happened, the last lines of the traceback, and the log file.
    `report` is the file on that host which holds the same text.
    """
    there = f", this report {report} there" if report else ""
    if verdict.cause in ("host", "interrupted"):
        return f"rankless: {verdict.headline}\nrankless: the job was ended, exit code {verdict.exit_code}\n"
    on_host = f" on {host}" if host else ""
    at = f" at {verdict.line}" if verdict.line else ""
    lines = [f"rankless: {verdict.root_cause}{on_host} {verdict.headline}{at}"]
    trace = shorten_traceback(verdict.traceback, limit=_TRACEBACK_LINES) if with_traceback else []
    lines += [f"    {line[:MAX_LINE_CHARS]}" for line in trace]
    lines.append(
        f"rankless: its log file is {log_file}{on_host}{there}; the job was ended, exit code {verdict.exit_code}"
    )
    return "\n".join(lines) + "\n"


def format_secondary_failures(failures: Sequence[tuple[str, SecondaryFailure]]) -> str:
    """Return a line for each rank that failed after the root cause; the first of each pair is its log file.

    Only MAX_SECONDARY_LINES ranks get a line.
    """
    lines = [
        f"rankless: after that, rank {failure.rank} {failure.text[:MAX_LINE_CHARS]}, its log file is {log_file}"
        for log_file, failure in failures[:MAX_SECONDARY_LINES]
    ]
    if len(failures) > len(lines):
        lines.append(f"rankless: after that, {format_count(len(failures) - len(lines), 'more rank')} failed too")
    return "".join(f"{line}\n" for line in lines)
