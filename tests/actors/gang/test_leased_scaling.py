"""Ray Train's configuration with a lease, in a process that did not make it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from raytide.actors.gang import ray_train
from raytide.control.client import ApiClient
from raytide.core.errors import UsageError


def test_a_copy_in_another_process_trains_nothing_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = ray_train._train.trainers
    monkeypatch.setattr(trainers.DataParallelTrainer, "fit", ray_train._plain_fit)
    monkeypatch.setattr(trainers, "create_scaling_policy", ray_train._plain_policy)
    scaling = ray_train.LeasedScaling(lambda: pytest.fail("no"), ApiClient("http://127.0.0.1:9", ""), 2)
    copy = pickle.loads(pickle.dumps(scaling))
    assert trainers.DataParallelTrainer.fit is ray_train._fit, "as where the configuration was made"
    with pytest.raises(UsageError, match="another process"):
        ray_train._fit(SimpleNamespace(scaling_config=copy))
