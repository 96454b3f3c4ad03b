"""Not collected by itself: what test_owner runs in a pytest of its own, which it kills meanwhile."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from raytide.control.bootstrap.cluster_record import LocalCluster


def test_waits(live: LocalCluster) -> None:
    told = {"session": os.environ["RAYTIDE_TEST_SESSION"], "cluster": live.cluster_id, "temp_dir": str(live.temp_dir)}
    path = Path(os.environ["WAITS_TELLS"])
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)
    time.sleep(280)
