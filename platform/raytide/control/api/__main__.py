"""The API process: `python -m raytide.control.api RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

from raytide.control.api.auth import JobTokens, Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.server import allow_connections, server
from raytide.control.api.services.service import ApiService
from raytide.control.bootstrap.cluster_record import load
from raytide.control.bootstrap.wiring import bill
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.control.job_tokens import key_in
from raytide.control.supervision.daemon import hold_lock
from raytide.control.views import last_pass_s
from raytide.core.clock import SystemClock
from raytide.core.io.private_paths import restrict_to
from raytide.core.logs import log_to
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.state import Store
from raytide.core.telemetry.targets import Target, announce


def main(run_dir: str) -> None:
    folder = Path(run_dir)
    cluster = load(folder)
    assert cluster is not None, run_dir
    log_to()
    with hold_lock(folder / "api.lock"):
        store = Store.open(cluster.state_url, head_epoch=cluster.head_epoch)
        clock = SystemClock()
        clock.go_on_from(last_pass_s(folder / "live.json"))
        config = load_cluster(cluster.config_path)
        restrict_to(config.settings.data_roots)
        service = ApiService(
            store=store,
            config=config.model_copy(update={"name": cluster.name}),
            bill=bill(cluster),
            drivers=RayJobs(cluster.dashboard_url, folder, cluster.ray_headers),
            clock=clock,
            live=folder / "live.json",
            serve_url=cluster.serve_url,
            ray_url=cluster.dashboard_url,
            ray_environment=cluster.ray_access,
            prometheus_url=cluster.prometheus_url if cluster.monitoring else "",
            alertmanager_url=cluster.alertmanager_url if cluster.monitoring else "",
        )
        service.packages.sweep()
        address = urlsplit(cluster.api_url)
        announce(folder, "api", Target("raytide-api", address.netloc))
        allow_connections()
        app = create_app(service, Tokens(cluster.tokens_file, JobTokens(key_in(folder), store)))
        server(app, address.hostname or cluster.head_ip, address.port or 7400).run()


if __name__ == "__main__":
    main(sys.argv[1])
