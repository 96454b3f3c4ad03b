"""A notebook shows whatever the SDK returns."""

import pytest

from raytide.actors.gang import Gang
from raytide.actors.trainer.types import RunResult
from raytide.control import views
from raytide.core.io.token_dataset import TokenManifest
from raytide.core.objects.gang import Lease, LeaseState, Member, Shape
from raytide.core.specs import data, model_version
from raytide.dashboards.figures.style import Picture
from raytide.sdk.bench import BenchReport
from raytide.sdk.bench.node.report import NodeReport
from raytide.sdk.client import Client
from raytide.sdk.jobs.flow_run import FlowRun
from raytide.sdk.jobs.job_run import Run
from raytide.sdk.jobs.train_run import TrainRun
from raytide.sdk.plan import PlanReport
from raytide.sdk.serving.endpoint import EndpointHandle
from raytide.workflows.view import StageView

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
    *(BenchReport, Client, EndpointHandle, FlowRun, Gang, Lease, Member, NodeReport, Picture, PlanReport, Run),
    *(RunResult, StageView, TokenManifest, TrainRun),
    *(getattr(views, name) for name in VIEWS),
    *(getattr(model_version, name) for name in ("AliasChange", "ModelVersion", "RegisteredModel")),
    *(getattr(data, name) for name in ("DatasetUse", "DatasetVersion", "RegisteredDataset")),
]


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_it_has_html(kind: type) -> None:
    assert callable(getattr(kind, "_repr_html_", None))


def test_a_lease_shows_its_members_and_units() -> None:
    members = (Member(0, node_id="node-3"), Member(1, node_id="<node-4>"))
    lease = Lease("lease-1", "job-1", Shape(resources={"CPU": 2.0}), LeaseState.ACTIVE, members)
    shown = lease._repr_html_()
    assert "node-3" in shown and "&lt;node-4&gt;" in shown and "active" in shown
    assert "60 s" in shown, "form_timeout_s"
