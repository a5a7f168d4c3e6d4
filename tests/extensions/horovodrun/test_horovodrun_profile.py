"""What a worker under horovodrun gets: its ranks in Horovod's terms, its variables, the names of its folders."""

import msgspec

from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import AgreedJobConfig
from rankless.extensions.horovodrun.profile import HorovodrunProfile
from rankless.extensions.horovodrun.settings import HorovodrunSettings, NamedHost

MEETING = {"master_address": "127.0.0.1", "master_port": 1, "store_address": "127.0.0.1", "store_port": 2}
START = AgreedJobConfig(run_id="run", seed=None, workers=(2, 1, 2), backend="gloo", **MEETING)
WORKER = WorkerConfig(
    rank=4,
    world_size=5,
    local_rank=1,
    local_world_size=2,
    device="cpu",
    threads=1,
    backend="gloo",
    run_id="run",
    seed=None,
    log_file="log",
    interface="eth0",
    **MEETING,
)


def test_workers_get_horovods_variables_on_hosts_of_different_sizes():
    job = HorovodrunSettings(
        hosts=(NamedHost(name="a", slots=2), NamedHost(name="b", slots=1), NamedHost(name="c", slots=2))
    )
    ranks = [(job.host_of(rank), job.assignment_of(rank)) for rank in range(5)]
    assert [(host, assignment.local_rank, assignment.local_size) for host, assignment in ranks] == [
        *(("a", 0, 2), ("a", 1, 2), ("b", 0, 1), ("c", 0, 2), ("c", 1, 2))
    ]
    assert [(assignment.cross_rank, assignment.cross_size) for _, assignment in ranks] == [
        (0, 3),
        (0, 2),
        (1, 3),
        (2, 3),
        (1, 2),
    ]
    profile = HorovodrunProfile(msgspec.structs.replace(job, variables=(("HOROVOD_CYCLE_TIME", "1"),)))
    found = profile.worker_environment(WORKER, START)
    assert found["HOROVOD_GLOO_IFACE"] == "eth0"
    assert found["HOROVOD_HOSTNAME"] == "c"
    assert [found[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")] == ["4", "5", "1", "2"]
    assert [found[f"HOROVOD_{name}"] for name in ("CROSS_RANK", "CROSS_SIZE", "CYCLE_TIME")] == ["1", "2", "1"]
    assert job.padded_rank(3) == "3"
    assert HorovodrunSettings(hosts=(NamedHost(name="a", slots=11),)).padded_rank(3) == "03"
