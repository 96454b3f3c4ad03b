"""Several heads of one cluster on this machine, with real PostgreSQL, Redis, Ray, sshd hosts. Each head has a home of
its own; the address of the head is one loopback address, which the processes of the head that leads have taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import yaml
from tests.sshd_fixture import SshdHosts, sshd_hosts

from raytide.control.bootstrap.cluster_record import AGENT_PORT_BASE, GCS_PORT_BASE, HeadCluster, load
from raytide.control.bootstrap.head.ray_start import HEAD_MARK
from raytide.control.bootstrap.loopback import claim
from raytide.control.client import ApiClient
from raytide.core.errors import RaytideError
from raytide.core.io.process import Process, kill_marked, marked
from raytide.core.state import Store

NAME = "heads"
LEASE_S = 4.0
ACTS = ("raytide.control.bootstrap.head.guard", "raytide.control.controller", "raytide.control.supervision.supervisor")

_WATCH = """
CREATE TABLE written (writer text, what text, row_name text);
CREATE FUNCTION note_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO written VALUES (
    current_setting('application_name'), TG_TABLE_NAME, to_jsonb(COALESCE(NEW, OLD)) ->> 'name');
  RETURN NULL;
END $$;
DO $$
DECLARE each record;
BEGIN
  FOR each IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'written' LOOP
    EXECUTE format('CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON %I FOR EACH ROW EXECUTE FUNCTION '
      'note_write()', each.tablename);
  END LOOP;
END $$;
"""


@dataclass(slots=True)
class Heads:
    """Machines that can be the head. `start` boots one, `kill` pulls its plug."""

    folder: Path
    file: Path
    state_url: str
    hosts: SshdHosts
    guards: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run_dir(self, name: str) -> Path:
        return self.folder / name / "clusters" / NAME

    def start(self, name: str) -> None:
        named = {"RAYTIDE_HOME": str(self.folder / name), HEAD_MARK: str(self.run_dir(name)), "PGAPPNAME": name}
        environment = {**os.environ, **named}
        command = [sys.executable, "-m", "raytide.cli", "head", str(self.file), "--standby", "--as", name, "--block"]
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / name / "guard.log").open("ab") as log:
            self.guards[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def processes(self, name: str) -> list[Process]:
        return marked(HEAD_MARK, str(self.run_dir(name)))

    def kill(self, name: str) -> None:
        """Ends all that runs on that machine at once, as a power cut does."""
        kill_marked(HEAD_MARK, str(self.run_dir(name)))
        if name in self.guards:
            self.guards.pop(name).wait(60)

    def pause(self, name: str) -> list[Process]:
        """Stops what acts on that machine; what holds its addresses is lost, as for a machine without a network."""
        paused = []
        for process in self.processes(name):
            command = psutil.Process(process.pid).cmdline()
            if any(module in command for module in ACTS) or ("head" in command and "--standby" in command):
                process.send(signal.SIGSTOP)
                paused.append(process)
        for process in self.processes(name):
            if process not in paused:
                process.send(signal.SIGKILL)
        return paused

    def record(self, name: str) -> HeadCluster:
        found = load(self.run_dir(name))
        assert isinstance(found, HeadCluster)
        return found

    def client(self) -> ApiClient:
        """A client of the address, with the operator's token of any machine."""
        found = next(self.folder.glob(f"*/clusters/{NAME}/client.json"))
        return ApiClient.from_run_dir(found.parent)

    def leader(self) -> str:
        """The machine that the API of the address names; empty while none answers."""
        try:
            return self.client().status().head
        except (RaytideError, StopIteration):
            return ""

    def standbys(self) -> tuple[str, ...]:
        """The machines that wait, as the head names them; none while no head answers."""
        try:
            return self.client().status().standbys
        except (RaytideError, StopIteration):
            return ()

    @contextmanager
    def store(self) -> Iterator[Store]:
        store = Store.open(self.state_url)
        try:
            yield store
        finally:
            store.close()

    def watch_writes(self) -> None:
        """Lets the database note each row that is written from now on, and by the processes of which machine."""
        with psycopg.connect(self.state_url, autocommit=True) as connection:
            connection.execute(_WATCH)

    def written_by(self, name: str) -> list[tuple[str, str]]:
        """The tables, and the names of rows that have one, that this machine has written since `watch_writes`."""
        with psycopg.connect(self.state_url) as connection:
            found = connection.execute("SELECT what, row_name FROM written WHERE writer = %s", (name,))
            return [(what, row or "") for what, row in found]

    def logs(self) -> str:
        found = sorted(self.folder.glob("*/guard.log"))
        return "\n".join(f"{log.parent.name}: {log.read_text()[-3000:]}" for log in found)

    def close(self) -> None:
        for file in self.folder.glob(f"*/clusters/{NAME}"):
            self.kill(file.parents[1].name)


def cluster_yaml(
    hosts: SshdHosts, numbers: tuple[int, ...], k: int, state_url: str, redis_port: int, folder: Path, min_workers: int
) -> dict[str, Any]:
    small = {"CPU": 2, "object_store_memory": 80_000_000}
    own = {"resources": small, "node_config": {}, "min_workers": min_workers, "max_workers": 4, "idle_timeout_s": 600}
    standby = {
        "address": f"127.0.{k}.1",
        "redis_url": f"redis://127.0.0.1:{redis_port}",
        "redis_password_file": str(folder / "redis_password"),
        "shared_dir": str(folder / "shared"),
        "gcs_port": GCS_PORT_BASE + k,
        "lease_s": LEASE_S,
        "ray_options": [
            f"--dashboard-host=127.0.{k}.1",
            "--dashboard-port=8265",
            f"--dashboard-agent-listen-port={AGENT_PORT_BASE + k}",
        ],
    }
    raytide = {
        "node_types": {"own": {"power_w": 200}},
        "hosts": hosts.section(*numbers, usd_per_kwh=0.3),
        "state_url": state_url,
        "standby": standby,
    }
    return {
        "cluster_name": NAME,
        "provider": {"type": "hosts"},
        "head_node_type": "head",
        "available_node_types": {"head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, "own": own},
        "metadata": {"raytide": raytide},
    }


@contextmanager
def heads(folder: Path, postgres_server: str, redis_port: int, *numbers: int, min_workers: int = 0) -> Iterator[Heads]:
    """Heads that are not started yet, and sshd machines of these numbers, which are."""
    database = f"t{uuid.uuid4().hex}"
    with psycopg.connect(postgres_server.format("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")  # type: ignore[arg-type]
    state_url = postgres_server.format(database)
    (folder / "shared").mkdir()
    (folder / "redis_password").write_text("redis")
    k, held = claim({k: [("0.0.0.0", GCS_PORT_BASE + k), ("0.0.0.0", AGENT_PORT_BASE + k)] for k in range(241, 250)})
    with held, sshd_hosts(folder / "hosts") as hosts:
        for n in numbers:
            hosts.start(n)
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(cluster_yaml(hosts, numbers, k, state_url, redis_port, folder, min_workers)))
        made = Heads(folder, file, state_url, hosts)
        try:
            yield made
        finally:
            made.close()


def wait_until(what: Callable[[], object], within_s: float, why: Callable[[], str]) -> float:
    """Returns the seconds that it took."""
    began_s = time.monotonic()
    while not what():
        assert time.monotonic() - began_s < within_s, f"not within {within_s:g} s\n{why()}"
        time.sleep(0.1)
    return time.monotonic() - began_s
