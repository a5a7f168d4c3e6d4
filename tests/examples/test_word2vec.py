"""Vectors of words are the same on one device, on two workers and with servers."""

import pytest
from support.example_runs import TWO_WORKERS, WITH_SERVERS, report_of

OPTIONS = ("--files", "5", "--epochs", "8", "--batch-size", "64")
CONSTANT = 2.703
"""The loss of one probability for all pairs, a sixth: that of a word to be in the context, with five others drawn."""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_shape_of_a_run_finds_the_same_vectors(tmp_path):
    wanted = report_of("word2vec", tmp_path, *OPTIONS)
    assert wanted["losses"][-1] < 0.9 * CONSTANT
    assert "self" in wanted["neighbors"]
    for where in (TWO_WORKERS, WITH_SERVERS):
        found = report_of("word2vec", tmp_path, *OPTIONS, where=where)
        assert found["losses"] == pytest.approx(wanted["losses"], rel=0, abs=1e-10)
        assert found["neighbors"] == wanted["neighbors"]
