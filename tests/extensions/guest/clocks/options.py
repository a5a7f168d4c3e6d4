from rankless.config.meaning_of_extension_options import NamedWorkers, RunOptions
from rankless.errors import ConfigError


def make_options():
    return ClockOptions()


class ClockOptions(RunOptions):
    def find_workers(self, given, *, worker_count, names_hosts):
        each = given.get("clocked-workers")
        return None if each is None else NamedWorkers(worker_count=given["clocks"] * each)

    def check(self, settings, request, cluster):
        if settings.get("clocks", 0) < 1 or request.elastic is not None:
            raise ConfigError(expected="--clocks from 1 up", found=settings, fix="give --clocks 1")

    def count_processes(self, settings, cluster):
        return settings["clocks"]

    def describe(self, settings):
        return f"{settings['clocks']} clocks"
