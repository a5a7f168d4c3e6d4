"""The part of the doctor that runs before every job on several hosts, on each of them: a fraction of a second."""

from collections.abc import Callable

from rankless.errors import JoinError
from rankless.launch.doctor.inside import look_quickly
from rankless.launch.doctor.questions import Look
from rankless.plan.run_plan import RunPlan


def quick_check(plan: RunPlan, tell: Callable[[str], None]) -> None:
    """Tell what may trouble a job on several hosts on this one; raise JoinError for what it would not survive."""
    company = plan.company
    assert company is not None
    # Of hosts that are only counted, host 0's address is known, and to the others alone.
    known = company.hosts if company.is_listed else company.hosts[:1]
    rows = look_quickly(
        Look(
            name=company.hosts[company.place].address,
            others=tuple(host.address for place, host in enumerate(known) if place != company.place),
            is_first=company.place == 0,
            has_several=True,
            workers=plan.worker_count,
            port=company.port,
            log_folder=plan.log_folder,
        )
    )
    warnings = [f"{row.name}: {row.seen}" for row in rows if row.status == "warn"]
    if warnings:
        tell(f"{'; '.join(warnings)} (rankless doctor tells the fix)")
    failures = [row for row in rows if row.status == "fail"]
    if failures:
        raise JoinError(
            expected=f"{company.hosts[company.place]} to be fit for a job on several hosts",
            found="; ".join(f"{row.name}: {row.seen}" for row in failures),
            fix="; ".join(row.fix for row in failures) + " (rankless doctor looks further)",
        )
