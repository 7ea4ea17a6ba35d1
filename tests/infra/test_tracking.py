"""What is sent to MLflow: names it takes, one series a key."""

import pytest

from moonshift.infra.tracking import LONGEST_NAME, metric_name


@pytest.mark.case("L05")
def test_metric_names_are_taken_and_stay_different() -> None:
    keys = ["kl@k3", "acc%", "../x", "/abs", "k" * 300, "k" * 301, "a@b", "a_b", "a_at_b", "a:25:b", "a%b", "a//b"]
    names = [metric_name(key) for key in keys]
    assert len(set(names)) == len(keys)
    assert metric_name("reward/mean") == "reward/mean"
    assert metric_name("loss:policy") == "loss:policy"
    assert all(len(name) <= LONGEST_NAME for name in names)


@pytest.mark.case("L05")
def test_mlflow_itself_takes_every_name() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for key in ("kl@k3", "acc%", "../x", "/abs", "k" * 300, "val-core/sums/reward/mean@1", "ü", "a//b", "a/./b"):
        _validate_metric_name(metric_name(key))
