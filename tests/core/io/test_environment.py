"""Nodes and commands get named variables of a shell, and nothing that looks like a secret."""

from __future__ import annotations

import pytest

from raytide.core.io.environment import ON_NODES, WITH_COMMANDS, all_passed, passed, without_proxy

SHELL = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/cache",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYTIDE_CLUSTER": "c-1",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_PROFILE": "work",
    "GOOGLE_APPLICATION_CREDENTIALS": "/file",
    "HF_TOKEN": "t",
    "VLLM_API_KEY": "k",
    "RAY_AUTH_TOKEN": "t",
    "RAY_AUTH_TOKEN_PATH": "/file",
    "RAY_ADDRESS": "127.0.0.1:6379",
    "RAYTIDE_API": "http://127.0.0.1:7400",
    "RAYTIDE_TOKEN": "admin",
    "RAYTIDE_HOME": "/home",
    "RAYTIDE_MLFLOW_TOKEN": "t",
    "SSH_AUTH_SOCK": "/socket",
}
HARMLESS = {"PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "HF_HOME", "TOKENIZERS_PARALLELISM", "RAYTIDE_CLUSTER"}


def test_a_users_command_gets_what_is_needed_to_compute() -> None:
    assert passed(SHELL, WITH_COMMANDS).keys() == HARMLESS


def test_a_node_gets_what_raytides_own_programs_need_besides() -> None:
    assert passed(SHELL, ON_NODES).keys() == {*HARMLESS, "RAYTIDE_HOME", "RAYTIDE_MLFLOW_TOKEN"}


@pytest.mark.parametrize(
    ("named", "more"),
    [
        (["AWS_*"], {"AWS_PROFILE"}),
        (["AWS_SECRET_ACCESS_KEY"], {"AWS_SECRET_ACCESS_KEY"}),
        (["aws_profile", "AWS"], set()),
        (["RAY*"], {"RAY_ADDRESS", "RAYTIDE_API", "RAYTIDE_HOME"}),
    ],
)
def test_the_operator_names_more_and_secrets_in_full(named: list[str], more: set[str]) -> None:
    assert passed(SHELL, WITH_COMMANDS, named).keys() == HARMLESS | more


def test_names_for_one_start_are_added_to_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_PASS", "B, C,,A")
    assert all_passed(["A"]) == ("A", "B", "C")


def test_only_a_loopback_address_is_kept_from_the_proxies_that_the_environment_names() -> None:
    assert without_proxy("http://127.0.9.1:8000/v1") == {"all://127.0.9.1": None}
    assert without_proxy("https://LOCALHOST/v1") == {"all://localhost": None}
    assert without_proxy("http://[::1]:8000") == {"all://[::1]": None}
    assert without_proxy("http://chat.example:8000/v1") == without_proxy("http://10.0.0.7") == without_proxy("") == {}
