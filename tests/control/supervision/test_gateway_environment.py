"""A gateway, which strangers reach, gets the keys of hosted APIs and no other secret of the operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytide.control.supervision.supervisor import Child, _environment

CLUSTER = Path(__file__).resolve().parents[3] / "platform/raytide/control/bootstrap/local.yaml"
HOSTED = """
    gateway:
      hosted:
        - {base_url: "https://api.example/v1", api_key_env: EXAMPLE_API_KEY}
"""


def test_a_gateway_gets_the_keys_of_hosted_apis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXAMPLE_API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "sk-secret")
    text = CLUSTER.read_text()
    gateway = Child("gateway-0", [])
    (tmp_path / "cluster.yaml").write_text(text)
    assert _environment(gateway, tmp_path).keys().isdisjoint({"EXAMPLE_API_KEY", "OTHER_API_KEY"})
    at = text.index("  raytide:") + len("  raytide:")
    (tmp_path / "cluster.yaml").write_text(text[:at] + HOSTED + text[at:])
    environment = _environment(gateway, tmp_path)
    assert environment["EXAMPLE_API_KEY"] == "sk-secret"
    assert "OTHER_API_KEY" not in environment
    (tmp_path / "cluster.yaml").write_text("not: [a cluster")
    assert "EXAMPLE_API_KEY" not in _environment(gateway, tmp_path)
