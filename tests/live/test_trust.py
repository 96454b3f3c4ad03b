"""A team is a boundary for a job's script and driver: their files, and the rights of the token that they find."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tests.cluster_fixture import OPERATORS, files_below, through_both_gateways

import raytide as rt
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.control.client import ApiClient
from raytide.control.job_tokens import PREFIX
from raytide.control.views import to_json
from raytide.core.io.process import marked
from raytide.core.objects.api_key import KeyBudget, KeySpec
from raytide.core.objects.job import JobState

pytestmark = pytest.mark.cluster

SHOW = """
import json, os, pathlib, time
print("found " + json.dumps(dict(os.environ)), flush=True)
while not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.05)
"""

# Everything that lies about, by a shell, since the interpreter may be in a folder of raytide's own user.
LOOK = """
id -u
env | grep -c -e RAY_ -e AWS
for file in {files}; do cat $file && echo READ $file; done
for process in /proc/[0-9]*; do
  if tr '\\0' '\\n' < $process/environ 2>/dev/null | grep -q -e OPERATORS_OWN -e RAY_AUTH; then echo LEAKS $process; fi
done
ls {folder} && echo LISTS
echo result > result && cat result
"""


@pytest.fixture
def shown(tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]) -> Iterator[tuple[rt.Run, dict[str, str]]]:
    """A script that runs, and its environment."""
    (tmp_path / "show.py").write_text(SHOW)
    go = tmp_path / "go"
    run = tide.run(tmp_path / "show.py", working_dir=tmp_path, env={"GO": str(go)})

    def found() -> list[str]:
        return [line.removeprefix("found ") for line in run.logs().splitlines() if line.startswith("found ")]

    eventually(found)
    try:
        yield run, json.loads(found()[0])
    finally:
        go.touch()
        run.wait(timeout_s=360.0)


def asker(live: LocalCluster, token: str) -> Callable[..., int]:
    def ask(method: str, path: str, body: object = None) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(method, f"{live.api_url}{path}", headers=headers, json=body, timeout=60).status_code

    return ask


def test_a_script_sees_nothing_of_the_operators_and_its_token_opens_its_own_job_alone(
    live: LocalCluster, shown: tuple[rt.Run, dict[str, str]]
) -> None:
    run, environment = shown
    assert not {*OPERATORS, "RAYTIDE_HOME", "RAYTIDE_CLUSTER_NAME"} & environment.keys()
    assert not [name for name in environment if name.startswith("RAY_")]
    assert environment["RAYTIDE_TOKEN"].startswith(PREFIX)
    assert environment["RAYTIDE_API"] == live.api_url
    assert environment[MARK] == live.cluster_id

    ask = asker(live, environment["RAYTIDE_TOKEN"])
    assert ask("GET", f"/v1/jobs/{run.id}") == 200
    assert ask("GET", f"/v1/jobs/{run.id}/lease") == 200
    for method, path, body in (
        ("GET", "/v1/plans", None),
        ("GET", "/v1/snapshot", None),
        ("PATCH", "/v1/teams/default", {"weight": 2}),
        ("PUT", f"/v1/jobs/{run.id}/budget?usd=1", None),
        (
            "POST",
            "/v1/jobs",
            {"kind": "gang", "name": "x", "team": "research", "gang": {"shapes": [{"resources": {}}]}},
        ),
    ):
        assert ask(method, path, body) in (400, 403), path


def test_drivers_and_nodes_have_nothing_of_the_operators(
    live: LocalCluster, shown: tuple[rt.Run, dict[str, str]]
) -> None:
    operators = ("supervisor", "controller", "api", "monitor", "owner")
    own = {process.pid for what in operators if (process := live.process(what))}
    seen: list[str] = []
    for process in marked(MARK, live.cluster_id):
        try:
            found = psutil.Process(process.pid)
            environment, command = found.environ(), " ".join(found.cmdline())
        except psutil.Error:  # it ended
            continue
        if process.pid not in own:
            assert not OPERATORS.keys() & environment.keys(), command
            assert "RAYTIDE_TOKEN" not in command
            seen.append(command)
    assert any("raytide.control.drivers.job_driver" in command for command in seen)
    assert any("raylet" in command for command in seen)


def test_a_jobs_token_ends_with_its_job(
    live: LocalCluster, shown: tuple[rt.Run, dict[str, str]], eventually: Callable[..., None]
) -> None:
    run, environment = shown
    ask = asker(live, environment["RAYTIDE_TOKEN"])
    assert ask("GET", "/v1/status") == 200
    Path(environment["GO"]).touch()
    run.wait(timeout_s=360.0)
    assert run.refresh().state is JobState.SUCCEEDED
    assert ask("GET", "/v1/status") == 401


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a script as another user")
def test_a_script_that_runs_as_another_user_reads_no_secret(
    live: LocalCluster, tide: rt.Client, tmp_path: Path
) -> None:
    """The driver reads cluster.yaml when it starts."""
    before = live.config_path.read_text()
    file: dict[str, Any] = yaml.safe_load(before)
    file["metadata"]["raytide"]["run_as"] = "nobody"
    secrets = (live.client_file, live.tokens_file, live.ray_token_file, live.run_dir / "job_key.json", live.config_path)
    logs = (live.log("controller"), live.run_dir / "state.db")
    look = LOOK.format(files=" ".join(map(str, (*secrets, *logs))), folder=live.ray_temp_dir)
    (tmp_path / "look.sh").write_text(look)
    live.config_path.write_text(yaml.safe_dump(file))
    try:
        run = tide.run("sh", "look.sh", working_dir=tmp_path)
        run.wait(timeout_s=360.0)
    finally:
        live.config_path.write_text(before)
    printed = run.logs().splitlines()
    assert printed[:2] == ["65534", "0"], printed
    assert not [line for line in printed if line.split()[0] in ("READ", "LEAKS", "LISTS")]
    assert sum("Permission denied" in line for line in printed) >= len(secrets), printed
    assert printed[-1] == "result"


def test_secrets_of_the_gateway_are_in_no_log_argument_or_snapshot(
    live: LocalCluster, eventually: Callable[..., None]
) -> None:
    """An API key, also where it is wrong or in a wrong place, and the gateways' own token."""
    with closing(ApiClient.from_run_dir(live.run_dir)) as api:
        made = api.create_key(KeySpec(name="probe", budget=KeyBudget(usd=1.0)))
        wrong = "rk-" + "wrong" * 8 + "abc"

        def is_known() -> bool:
            return ask(made.secret).status_code == 200

        def ask(secret: str, path: str = "/v1/models", **more: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {secret}"}
            return httpx.request(more.pop("method", "GET"), live.serve_url + path, headers=headers, timeout=60, **more)

        eventually(lambda: through_both_gateways(is_known))
        assert ask(wrong).status_code == 401
        assert ask(made.secret, f"/v1/{made.secret}").status_code == 404
        assert ask(made.secret, f"/v1/models?key={made.secret}").status_code == 200
        body = {"model": made.secret, "prompt": made.secret}
        assert ask(made.secret, "/v1/completions", method="POST", json=body).status_code == 404
        assert ask(wrong, "/v1/completions", method="POST", content=b"{").status_code == 401
        rotated = api.rotate_key(made.key.id)
        eventually(lambda: through_both_gateways(lambda: ask(rotated.secret).status_code == 200))
        api.revoke_key(rotated.key.id)
        eventually(lambda: through_both_gateways(lambda: ask(rotated.secret).status_code == 401))
        secrets = {made.secret, rotated.secret, wrong, json.loads(live.gateway_file.read_text())["token"]}
        shown = [json.dumps(to_json(api.snapshot())), json.dumps([to_json(each) for each in api.audit(limit=1000)])]
    for process in marked(MARK, live.cluster_id):
        with suppress(psutil.Error):  # it ended
            shown.append(" ".join(psutil.Process(process.pid).cmdline()))
    assert any("raytide.gateway" in text for text in shown)
    files = [path for folder in (live.run_dir, live.ray_temp_dir) for path in files_below(folder)]
    assert any(path.parent.name == "logs" for path in files)
    own = {live.gateway_file, live.tokens_file}
    for path in files:
        with suppress(OSError):
            if path not in own:
                shown.append(path.read_bytes().decode(errors="replace"))
    for text in shown:
        assert not [secret for secret in secrets if secret in text]
