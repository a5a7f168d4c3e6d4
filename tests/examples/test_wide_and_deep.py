"""Click prediction with two tables gives the same numbers on one device, on two workers and with servers."""

import pytest
from support.example_runs import EXAMPLES, TWO_WORKERS, WITH_HETEROGENEOUS, WITH_SERVERS, report_of
from support.verify_output import read_verdict
from support.warm_runs import rankless

OPTIONS = ("--rows", "6000", "--epochs", "2", "--batch-size", "200")


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return report_of("wide_and_deep", tmp_path_factory.mktemp("one"), *OPTIONS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_device_learns_to_predict_clicks(one_device):
    # Chance gives 0.5, with a standard deviation of about 0.025.
    assert one_device["auc"] > 0.62
    assert one_device["losses"][1] < one_device["losses"][0]
    assert one_device["rows"]["deep"] > 1000


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [WITH_SERVERS, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (TWO_WORKERS, WITH_HETEROGENEOUS))],
)
def test_every_shape_of_a_run_predicts_the_same_clicks(tmp_path, one_device, where):
    found = report_of("wide_and_deep", tmp_path, *OPTIONS, where=where)
    assert found["losses"] == pytest.approx(one_device["losses"], rel=0, abs=1e-10)
    assert found["auc"] == pytest.approx(one_device["auc"], rel=0, abs=1e-10)
    assert found["rows"] == one_device["rows"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_verify_calls_click_prediction_with_servers_the_same_training(tmp_path):
    options = ("--rows", "1500", "--epochs", "1", "--batch-size", "150")
    command = ("verify", "--servers", "2", "--workers", "3", str(EXAMPLES / "wide_and_deep.py"))
    done = rankless(*command, *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_verdict(done.stdout).startswith("same training: ")
