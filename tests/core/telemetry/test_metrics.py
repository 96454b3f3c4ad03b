from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import raytide
from raytide.core.telemetry.catalogue import LAYERS
from raytide.core.telemetry.catalogue.cost import BOOKED
from raytide.core.telemetry.catalogue.infrastructure import NODES
from raytide.core.telemetry.metrics import MetricSample, render


def test_what_is_rendered_is_what_prometheus_reads() -> None:
    text = render(
        [
            MetricSample(BOOKED, 1.5, ("job",)),
            MetricSample(NODES, 2, ("spot-a", "spot", "ready")),
            MetricSample(BOOKED, 2.0, ("idle",)),
        ]
    )
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert set(families) == {"raytide_nodes", "raytide_booked_usd"}
    assert families["raytide_nodes"].samples[0].labels == {"type": "spot-a", "market": "spot", "state": "ready"}
    assert {s.labels["kind"]: s.value for s in families["raytide_booked_usd"].samples} == {"job": 1.5, "idle": 2.0}


def test_names_are_unique_and_say_whose_they_are() -> None:
    names = [metric.name for metrics in LAYERS.values() for metric in metrics]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("raytide_", "DCGM_FI_", "ray_")) and not name.endswith("_total") for name in names)


def test_the_catalogue_itself_needs_no_prometheus() -> None:
    root = str(Path(next(iter(raytide.__path__))).parent)
    code = "import sys, raytide.core.telemetry.catalogue; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})
