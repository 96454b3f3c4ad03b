"""`--monitoring` says what is missing and how to get it, and where it belongs in a cloud."""

from pathlib import Path

import pytest

from raytide.cli import cluster
from raytide.core.errors import UsageError
from raytide.dashboards.prometheus import programs


def test_missing_programs_are_named_with_the_way_to_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "find_program", lambda name: None if name == "alertmanager" else f"/usr/bin/{name}")
    assert not cluster._has_monitoring()
    said = capsys.readouterr().err
    assert said.startswith("warning: no monitoring: alertmanager not installed. ")
    assert "apt-get install prometheus prometheus-alertmanager" in said


def test_installed_programs_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("prometheus", "prometheus-alertmanager"):  # as Debian calls them
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster._has_monitoring()
    assert programs.find_program("alertmanager") == str(tmp_path / "prometheus-alertmanager")


def test_in_a_cloud_it_belongs_to_the_head_s_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="belongs to the head's command") as refused:
        cluster.up(config=tmp_path / "cluster.yaml", monitoring=True)
    assert "raytide head ~/ray_bootstrap_config.yaml --monitoring" in refused.value.hint
