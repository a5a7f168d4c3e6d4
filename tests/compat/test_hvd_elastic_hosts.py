"""An elastic job on two machines: one of them comes while it runs, and is lost while it runs."""

import re
import sys
from pathlib import Path

import pytest
from compat.test_hvd_elastic_jobs import SCRIPT, assert_every_sample_was_seen, done, lines, results, wait_for_size
from hosts import two_hosts
from jobs import is_alive, wait_until


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_machine_comes_by_ssh_and_is_lost_and_the_training_goes_on(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.read_text())
    (folder / "discover.sh").write_text("#!/bin/sh\ncat hosts\n")
    (folder / "discover.sh").chmod(0o755)
    (folder / "hosts").write_text("a:1\n")
    epochs = 12
    with two_hosts(tmp_path, sshd=("b",)) as hosts:
        options = ("-np", "1", "--min-np", "1", "--host-discovery-script", "./discover.sh")
        program = (sys.executable, "train.py", str(epochs), "0.1")
        job = hosts.start("a", [sys.executable, "-m", "rankless", "horovodrun", *options, *program], cwd=folder)
        wait_for_size(folder, 1)
        (folder / "hosts").write_text("a:1\nb:2\n")
        start = wait_for_size(folder, 3)
        there = {process_id for process_id, words in lines(folder, "began") if words[1] == "3" and words[0] != "0"}
        wait_until(lambda: max(each.steps for each in done(folder)) > start + 2, seconds=60)
        (folder / "hosts").write_text("a:1\n")
        hosts.link("b", up=False)  # nothing tells its peers that it is gone
        out, err = job.communicate(timeout=120)
        wait_until(lambda: not any(map(is_alive, there)), seconds=30)
    assert job.returncode == 0, out + err
    assert len(results(out)) == 1
    assert_every_sample_was_seen(folder, epochs=epochs)
    assert re.search(r"round 2: 3 workers, by rank: 0 \(a\), 1 \(b\), 2 \(b\)", err)
    assert "host b is lost" in err
