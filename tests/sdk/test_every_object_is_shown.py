"""A notebook shows whatever the SDK returns."""

import pytest

from raytide.actors.gang import Gang
from raytide.control import views
from raytide.core.io.token_dataset import TokenManifest
from raytide.core.specs import model_version
from raytide.dashboards.figures.style import Picture
from raytide.sdk.bench import BenchReport
from raytide.sdk.bench.node.report import NodeReport
from raytide.sdk.client import Client
from raytide.sdk.jobs.job_run import Run
from raytide.sdk.jobs.train_run import TrainRun
from raytide.sdk.serving.endpoint import EndpointHandle

VIEWS = (
    "ClusterStatus",
    "CostReport",
    "CostTable",
    "EndpointStatus",
    "JobView",
    "RolloutStatus",
    "TeamView",
    "WhyView",
)
SHOWN = [
    *(BenchReport, Client, EndpointHandle, Gang, NodeReport, Picture, Run, TokenManifest, TrainRun),
    *(getattr(views, name) for name in VIEWS),
    *(getattr(model_version, name) for name in ("AliasChange", "ModelVersion", "RegisteredModel")),
]


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_it_has_html(kind: type) -> None:
    assert callable(getattr(kind, "_repr_html_", None))
