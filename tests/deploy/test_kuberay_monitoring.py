"""The manifest for the Prometheus operator fits KubeRay's head pod, raytide's API and the jobs that alerts know.

It was never applied: no Kubernetes is here, and none of its schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import yaml

from raytide.control.bootstrap.head.cloud_head import API_PORT
from raytide.core.telemetry.targets import ScrapeJob

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def documents(name: str) -> dict[str, dict[str, Any]]:
    found = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    assert len({each["kind"] for each in found}) == len(found)
    assert all(each["apiVersion"] and each["metadata"]["name"] for each in found)
    return {each["kind"]: each for each in found}


def test_the_service_leads_to_the_api_in_the_head_pod() -> None:
    cluster, service = documents("kuberay.yaml")["RayCluster"], documents("kuberay-monitoring.yaml")["Service"]
    assert service["spec"]["selector"] == {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
    (port,) = service["spec"]["ports"]
    assert port["port"] == port["targetPort"] == API_PORT


def test_every_page_is_read_once_under_the_job_that_the_alerts_know() -> None:
    found = documents("kuberay-monitoring.yaml")
    service, monitor, scrape = found["Service"], found["ServiceMonitor"], found["ScrapeConfig"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert job in get_args(ScrapeJob)
    (drop,) = scrape["spec"]["relabelings"]
    assert (drop["sourceLabels"], drop["regex"], drop["action"]) == (["job"], job, "drop")
    assert endpoint["honorLabels"] and scrape["spec"]["honorLabels"]
    (targets,) = scrape["spec"]["httpSDConfigs"]
    url = urlsplit(targets["url"])
    assert (url.hostname, url.port) == (f"{service['metadata']['name']}.ml.svc", API_PORT)
    routes = (ROOT / "platform" / "raytide" / "control" / "api" / "routes.py").read_text()
    assert all(f'@app.get("{path}")' in routes for path in (endpoint["path"], url.path))


def test_queue_and_ledger_are_on_a_claim_that_both_containers_of_the_head_have() -> None:
    found = documents("kuberay.yaml")
    pod = found["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    claim = found["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    (volume,) = (each for each in pod["volumes"] if "persistentVolumeClaim" in each)
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for container in pod["containers"]:
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == volume["name"])
        home = next(each["value"] for each in container["env"] if each["name"] == "RAYTIDE_HOME")
        assert mount["mountPath"] == home


def test_the_pods_run_as_the_image_s_user() -> None:
    text = (ROOT / "deploy" / "images" / "Containerfile").read_text()
    assert "USER 1000:1000" in text
    cluster = documents("kuberay.yaml")["RayCluster"]["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["securityContext"]["fsGroup"] == 1000
