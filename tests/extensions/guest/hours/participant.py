import contextlib

import hours.operators  # noqa: F401  # torch knows the operators then
from rankless.collectives.byte_messages import all_gather_bytes
from rankless.context.extension_participants import JobParticipant, JointParticipant
from rankless.jobs.job_definition import CallResult
from rankless.jobs.programs.bound_program import collect_inputs


def make_joint_participant(events, config, workers):
    return Hours(events.upcoming)


class Hours(JointParticipant):
    """Prints what it hears, on every rank. All ranks must hear the same."""

    def __init__(self, upcoming):
        self.upcoming, self.heard = upcoming, []

    def join_job(self, job, world):
        return JobHours(self.heard, world)

    def make_view(self, job, world):
        return OwnView() if job.name == "tell" else None

    def reads_early(self, world):
        self.upcoming.is_wanted = True
        return True

    @contextlib.contextmanager
    def step(self, optimizer):
        self.heard.append("step")
        yield

    def end_step(self):
        self.heard.append("end_step")

    def meet(self, operation):
        self.heard.append(f"meet {operation}")

    def finish(self):
        self.heard.append("finish")

    def close(self):
        print("heard", *self.heard, "close", sep="\n", flush=True)


class OwnView:
    def run(self, arguments):
        return CallResult("twelve o'clock")


class JobHours(JobParticipant):
    def __init__(self, heard, world):
        self._heard, self._world = heard, world

    def begin_call(self):
        self._heard.append("begin_call")
        assert len(set(all_gather_bytes("\n".join(self._heard).encode(), mesh=self._world.workers))) == 1

    def begin_program(self):
        self._heard.append("begin_program")

    def end_program(self, bound, call):
        values = collect_inputs(bound, call.arguments, call.shardings, self._world.mesh)
        ((face, ids),) = bound.local.ids(values, list(bound.sizes(call.arguments).values()))
        assert face == 0
        self._heard.append(f"end_program that looks up {len(ids)} of this rank's hours")

    def count_call(self):
        self._heard.append("count_call")

    def end_call(self):
        self._heard.append("end_call")

    def prepare_next_call(self):
        self._heard.append("prepare_next_call")
