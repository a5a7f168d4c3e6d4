"""`horovod.run` calls a script's function on several processes, and returns the results by rank."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rankless.config.environment import python_path_at_start
from rankless.extensions.horovod import run
from rankless.extensions.horovod.runner.function_job import format_options, make_flags
from rankless.extensions.horovodrun.parser import HorovodrunFlags

SCRIPT = """
import sys
import horovod
from beside import scaled

class Own:
    def __init__(self, value):
        self.value = value

def work(first, second=0):
    import horovod.torch as hvd, torch
    hvd.init()
    total = hvd.allreduce(torch.tensor([first + hvd.rank()]), op=hvd.Sum)
    return Own(scaled(total.item() + second)), hvd.size()

def fails():
    import os
    if os.environ["HOROVOD_RANK"] == "1":
        raise KeyError("nobody has it")
    import time
    time.sleep(600)

found = horovod.run(work, args=(10,), kwargs={"second": 5}, num_proc=3)
assert [(own.value, size) for own, size in found] == [(380, 3)] * 3, found
assert all(isinstance(own, Own) for own, _ in found)
try:
    horovod.run(fails, num_proc=2)
except RuntimeError as error:
    print(error)
"""
GIVEN = dict.fromkeys(
    (
        *("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile"),
        *("start_timeout", "ssh_port", "ssh_identity_file", "disable_cache", "output_filename", "verbose"),
        *("use_gloo", "use_mpi", "mpi_args", "network_interface", "np", "min_np", "max_np"),
    )
) | {"num_proc": 1}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_function_of_a_script_runs_on_each_process_and_returns_results_by_rank(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/beside.py").write_text("def scaled(value):\n    return 10 * value\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([python_path_at_start(), str(tmp_path / "lib")])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "The first process to do so was:\nProcess name: 1\nExit code: 1\nTraceback" in done.stdout
    assert done.stdout.endswith("KeyError: 'nobody has it'\n\n")
    assert "[1]<stderr>:KeyError: 'nobody has it'" in done.stderr


def test_its_keywords_are_horovodruns_options():
    flags = make_flags(
        {
            **GIVEN,
            **{"num_proc": 4, "hosts": "a:2,b:2", "ssh_port": 2222, "verbose": True, "use_gloo": True},
            **{"network_interface": "eth0,eth1", "cooldown_range": (1, 2), "slots": 2, "mpi_args": "--x y"},
        }
    )
    assert list(format_options(flags)) == [
        *("--num-proc=4", "--network-interfaces=eth0,eth1", "--verbose", "--ssh-port=2222", "--slots-per-host=2"),
        *("--blacklist-cooldown-range", "1", "2", "--mpi-args=--x y", "--hosts=a:2,b:2", "--gloo"),
    ]
    assert make_flags(GIVEN) == HorovodrunFlags(num_proc=1)


def test_old_names_of_keywords_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match="min_np is deprecated, use min_num_proc instead"):
        assert make_flags({**GIVEN, "min_np": 2}).min_num_proc == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert make_flags({**GIVEN, "np": 3}).num_proc == 3
        assert make_flags({**GIVEN, "np": 3, "num_proc": 2}).num_proc == 2


def test_arguments_that_exclude_each_other_raise_horovods_errors():
    with pytest.raises(ValueError, match="Argument hosts and hostfile only allow one provided"):
        run(print, hosts="a:1", hostfile="file")
    with pytest.raises(ValueError, match="Argument use_gloo and use_mpi only allow one set True"):
        run(print, use_gloo=True, use_mpi=True)
