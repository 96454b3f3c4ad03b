"""A drill: restores the newest snapshot into a scratch folder, starts a control plane on it, and checks the restored
state.

A backup that was never restored proves nothing. A drill reads the whole snapshot and a part of the other data in the
repository. It measures the time to restore (RTO) and the age of the snapshot (RPO). It does not touch the cluster.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import sqlalchemy as sa

from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.control.backup.contents import SavedFolder, problem_of
from raytide.control.backup.place import CONFIG, BackupPlace
from raytide.control.backup.repository import Repository
from raytide.control.backup.restore import Unpacked, below, find_snapshot, hold_back, unpack
from raytide.control.backup.results import DrillResult, failures_recorded, record_drill
from raytide.control.backup.run import STATE, working
from raytide.control.bootstrap.cluster_record import HeadCluster
from raytide.control.reconcile.decide import decide
from raytide.control.reconcile.observation import ClusterObservation
from raytide.control.reconcile.records import ClusterRecords, take_snapshot
from raytide.core.config import raytide_version
from raytide.core.errors import StorageError
from raytide.core.io.atomic_file import write_json
from raytide.core.io.process import free_port
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.state import Store
from raytide.core.state.database import Database
from raytide.core.state.tables import entries, totals

_API_S = 60.0
_FORWARD_S = 1800.0
_POLL_S = 0.1
_MOST_PORTS = 3
"""The ports that a drill's API is started with, one after the other, while another process opens each first."""
_DAY_S = 86_400.0


def drill(place: BackupPlace, *, is_cold: bool = False, now_s: Callable[[], float] = time.time) -> DrillResult:
    """Runs a drill, records the result for the metrics, and returns the result. The result of a drill of the cold
    repository (`is_cold`) is not recorded. Damage that the drill finds is part of the result. If the drill cannot be
    run, the error is recorded and raised."""
    with working(place.cluster):
        scratch = place.work_dir / f"drill-{secrets.token_hex(4)}"
        for left in place.work_dir.glob("drill-*"):
            shutil.rmtree(left, ignore_errors=True)
        repository = place.cold if is_cold else place.hot
        if repository is None:
            raise StorageError("there is no cold repository.", hint="Set metadata.raytide.backup.cold_repository.")
        try:
            with failures_recorded(place, "drill", now_s):
                result = _drill(place, repository, scratch, now_s())
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if not is_cold:
            record_drill(place, result)
        return result


def _drill(place: BackupPlace, repository: Repository, scratch: Path, at_s: float) -> DrillResult:
    """Returns the result of a drill. It checks the repository first: a restore would wait for missing data."""
    parts = place.settings.drill_parts
    snapshot = find_snapshot(repository, place.cluster)
    found = DrillResult(at_s=at_s, snapshot=snapshot.id, lost_s=max(0.0, at_s - snapshot.at_s))
    part = int(at_s // _DAY_S) % parts + 1
    if problems := repository.check() or repository.check(part, parts):  # reading waits for packs that are missing
        return found.model_copy(update={"problems": problems, "skipped": ("the restore: the repository is damaged",)})
    began_s = time.monotonic()
    try:
        unpacked = unpack(repository, snapshot, scratch)
    except StorageError as error:
        return found.model_copy(update={"problems": (str(error),), "skipped": ("all that follows the restore",)})
    state = unpacked.staging / STATE
    hold_back(state, unpacked.manifest, snapshot.id)
    from_api = _problems_of_api(unpacked, state)
    restore_s = 0.0 if from_api else time.monotonic() - began_s
    from_folders, skipped = _problems_of_folders(unpacked)
    every = [*unpacked.problems, *from_api, *problems_of_state(unpacked, state), *from_folders]
    size = sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file() and not file.is_symlink())
    measured = {"restore_s": restore_s, "lost_s": max(0.0, at_s - unpacked.manifest.at_s), "bytes": size}
    return found.model_copy(update={**measured, "problems": tuple(dict.fromkeys(every)), "skipped": tuple(skipped)})


def _problems_of_folders(unpacked: Unpacked) -> tuple[list[str], list[str]]:
    """Reads every byte of the sealed folders, and tries the newest model; returns the problems, and the checks that
    were skipped."""
    folders = unpacked.manifest.contents.folders
    found = [problem for each in folders if (problem := problem_of(each, below(unpacked.scratch, each.stored_as)))]
    model = _newest_model(folders, unpacked.scratch)
    if model is None:
        return found, []
    broken, unchecked = _try_model(model)
    return [*found, *broken], unchecked


def problems_of_state(unpacked: Unpacked, state: Path) -> Iterator[str]:
    """Yields the problems of the restored state. Checks the ledger's sums, the audit log's hash chain, and the specs of
    jobs. Also checks that the state contains a hold, which prevents a restored controller from acting at once. Computes
    one decision from the restored records, to check that the controller could decide.
    """
    with closing(Database(f"sqlite:///{state}")) as database, database.read() as c:
        booked, kept = (
            c.execute(sa.select(sa.func.sum(each.c.amount_micro_usd))).scalar() for each in (entries, totals)
        )
    if (booked or 0) != (kept or 0):
        yield f"the ledger's entries sum to {booked} micro-dollars, and its totals to {kept}."
    with closing(Store.open(f"sqlite:///{state}")) as store:
        chain = store.tenancy.audit.verify()
        if not chain.is_whole:
            yield f"the audit log is broken at entry {chain.broken_seq}: {chain.problem}."
        stored = store.load()
        yield from (f"the spec of {job.id} cannot be read: {job.unreadable}." for job in stored.jobs if job.unreadable)
        if store.orders.hold() is None:
            yield "the restored controller would act at once: its state has no hold."
        config = load_cluster(unpacked.run_dir / CONFIG)
        nothing = ClusterObservation(None, (), None, (), None, None, {})
        records = ClusterRecords.of(stored)
        try:
            decide(take_snapshot(records, nothing, IdleClock(), config, unpacked.manifest.at_s))
        except Exception as error:  # whatever it is, the restored controller would meet it
            yield f"no decision can be made on the restored records: {type(error).__name__}: {error}."


def _problems_of_api(unpacked: Unpacked, state: Path) -> list[str]:
    """Starts an API on the copy, and returns the differences between its answers and the records."""
    for _ in range(_MOST_PORTS):
        found = _nodes_of_api(unpacked, state)
        if not (isinstance(found, str) and "address already in use" in found):
            break
    if isinstance(found, str):
        return [f"the restored API did not answer: {found}"]
    with closing(Store.open(f"sqlite:///{state}")) as store:
        live = {node.id for node in store.nodes(live=True)}
    missing = live - found
    return [f"the restored API does not list {', '.join(sorted(missing))}."] if missing else []


def _nodes_of_api(unpacked: Unpacked, state: Path) -> set[str] | str:
    """Returns the ids of the nodes that an API lists, which runs on the copy meanwhile, or why it does not answer."""
    run_dir, port = unpacked.run_dir, free_port()
    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{port}"
    config = load_cluster(run_dir / CONFIG)
    (run_dir / "logs").mkdir(exist_ok=True)
    HeadCluster(
        name=config.name,
        cluster_id=f"drill-{secrets.token_hex(6)}",
        run_dir=run_dir,
        gcs_address="127.0.0.1:1",
        dashboard_url="http://127.0.0.1:1",
        api_url=address,
        serve_url="http://127.0.0.1:1",
        state_url=f"sqlite:///{state}",
        config_path=run_dir / CONFIG,
        created_at_s=unpacked.manifest.at_s,
        version=raytide_version(),
    ).save()
    write_json(run_dir / "tokens.json", {token: {"user": "drill", "team": "*"}})
    log = run_dir / "logs" / "api.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "raytide.control.api", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "RAYTIDE_HOME": str(unpacked.scratch)},
        )
    try:
        found = _ask(process, address, token)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if isinstance(found, str):
        tail = " ".join(log.read_text(errors="replace").split())[-300:]
        return f"{found} {tail}".rstrip()
    return found


def _ask(process: subprocess.Popen[bytes], address: str, token: str) -> set[str] | str:
    """Returns the ids of the nodes that the API lists, or why it does not answer."""
    deadline, why = time.monotonic() + _API_S, "it did not start in time."
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"it ended with exit code {process.returncode}."
        try:
            answer = httpx.get(
                f"{address}/v1/status", headers={"Authorization": f"Bearer {token}"}, timeout=10.0, trust_env=False
            )
            if answer.is_success:
                return {str(node["id"]) for node in answer.json()["nodes"]}
            return f"it answered {answer.status_code}: {answer.text[:300]}"
        except httpx.HTTPError as error:
            why = f"{error}."
        time.sleep(_POLL_S)
    return why


def _try_model(model: Path) -> tuple[list[str], list[str]]:
    """Runs a forward pass of a restored model in another process; returns its problems and why it was left out."""
    if importlib.util.find_spec("torch") is None:
        return [], [f"no forward pass of {model.name}: torch is not installed here"]
    command = [sys.executable, "-m", "raytide.control.backup.forward_pass", str(model)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FORWARD_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"the forward pass of {model.name} took longer than {_FORWARD_S:.0f} s."], []
    if done.returncode == 0:
        return [], []
    return [f"the model {model.name} does not run: {done.stderr.strip()[-300:]}"], []


def _newest_model(folders: tuple[SavedFolder, ...], scratch: Path) -> Path | None:
    """Returns the folder of the newest model with a `config.json`: a registered one or the export of a run."""
    found = []
    for folder in folders:
        path = below(scratch, folder.stored_as)
        path = path / "model" if folder.kind == "run" else path
        if folder.kind in ("model", "run") and (path / "config.json").exists():
            found.append(path)
    return max(found, key=lambda path: (path / "config.json").stat().st_mtime, default=None)
