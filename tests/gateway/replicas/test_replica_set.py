"""A replica whose engine has died gets nothing until it says, after its death, that it is well."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from raytide.actors.engine.backends.remote.wire import STATUS_PERIOD_S
from raytide.core.errors import EngineDeadError
from raytide.gateway.replicas.replica_set import Replica


def test_a_status_that_was_written_before_a_death_brings_no_replica_back() -> None:
    status: Any = SimpleNamespace(problem=None, is_draining=False, at_s=time.monotonic())
    replica = Replica("a", SimpleNamespace(is_connected=True, status=status), None)  # type: ignore[arg-type]
    assert replica.takes_requests
    with pytest.raises(EngineDeadError), replica._noticing_death():
        raise EngineDeadError("gone")
    died_s = replica._died_s
    for later_s, is_back in ((0.0, False), (STATUS_PERIOD_S / 2, False), (STATUS_PERIOD_S + 0.01, True)):
        status.at_s = died_s + later_s
        assert replica.takes_requests is is_back
