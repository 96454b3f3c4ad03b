"""The monitor's process: `python -m raytide.dashboards.monitor RUN_DIR`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from raytide.control.bootstrap.cluster_record import load
from raytide.control.client.api_client import ApiClient
from raytide.control.supervision.daemon import hold_lock
from raytide.core.io.environment import is_loopback
from raytide.core.logs import log_to
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.telemetry.targets import Target, announce
from raytide.dashboards.alerts.client import OperatorClient
from raytide.dashboards.alerts.notify.dispatch import Dispatcher
from raytide.dashboards.alerts.notify.receivers import receivers_of
from raytide.dashboards.alerts.records import FILE, AlertRecords
from raytide.dashboards.alerts.runner import ActionRunner
from raytide.dashboards.history.reader import HistoryReader
from raytide.dashboards.history.writer import FILE as HISTORY_FILE
from raytide.dashboards.history.writer import HistoryWriter
from raytide.dashboards.monitor.alerting import Alerting
from raytide.dashboards.monitor.anomalies import Anomalies
from raytide.dashboards.monitor.certificates import CertificateWatch, addresses_of
from raytide.dashboards.monitor.monitor import Monitor
from raytide.dashboards.monitor.probes import ProbeKey, Prober
from raytide.dashboards.monitor.scraper import Scraper
from raytide.dashboards.rules.overrides import adjusted_groups


async def watch(folder: Path) -> None:
    """Watches the cluster of this run folder until SIGTERM."""
    cluster = load(folder)
    assert cluster is not None, folder
    settings = load_cluster(cluster.config_path).settings
    config = settings.monitoring
    most_bytes = config.history_mb << 20
    history = HistoryWriter(folder / HISTORY_FILE, days=config.history_days, most_bytes=most_bytes)
    records = AlertRecords(folder / FILE)
    runner = ActionRunner(records, config.actions, lambda: OperatorClient(ApiClient.from_run_dir(folder)), os.environ)
    dispatcher = Dispatcher(records, receivers_of(config.notify, cluster.name, os.environ), config.notify)
    rules = [rule for group in adjusted_groups(config.alerts).values() for rule in group]
    reader = HistoryReader(folder / HISTORY_FILE)
    alerting = Alerting(folder, rules, records, runner, dispatcher, reader, config.scrape_s)
    needs_key = settings.gateway.demands_keys(is_loopback=is_loopback(urlsplit(cluster.serve_url).hostname or ""))
    async with httpx.AsyncClient(trust_env=False) as http:
        scraper = Scraper(http, history)
        key = ProbeKey(folder, config.probe_team, needs_key)
        prober = Prober(config.probes, cluster.serve_url, http, key, folder)
        certificates = CertificateWatch(addresses_of(settings, os.environ))
        anomalies = Anomalies(reader, config.history_days, folder)
        monitor = Monitor(
            folder,
            cluster.api_url,
            config.scrape_s,
            history,
            scraper,
            http,
            alerting,
            runner,
            anomalies,
            lambda: (*prober.samples(), *certificates.samples()),
        )
        announce(folder, "monitor", Target("raytide-monitor", await monitor.page.start(cluster.head_ip)))
        task = asyncio.gather(monitor.run(), prober.run(), certificates.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            pass
        finally:
            monitor.page.close()
            history.close()


def main(run_dir: str) -> None:
    folder = Path(run_dir)
    log_to()
    with hold_lock(folder / "monitor.lock"):
        asyncio.run(watch(folder))


if __name__ == "__main__":
    main(sys.argv[1])
