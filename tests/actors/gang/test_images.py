"""Images of jobs: references that reach no shell, failures of pulls told apart, and workers that start inside."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RuntimeEnvSetupError
from ray.runtime_env import RuntimeEnv

from raytide.actors.gang import images, prepared_actor
from raytide.actors.gang.images import ImagePullError, failure_of, name_of, prepare
from raytide.actors.gang.member_actor import pass_on
from raytide.actors.gang.prepared_actor import PreparedActor
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ClusterError, ConfigError, DeniedError
from raytide.core.objects.cluster_config import RaytideSection
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec

TRAIN = {"dataset": "/data", "out": "/out", "steps": 1}
DIGEST = f"sha256:{'0a' * 32}"
IMAGE = "registry.example.com:5000/team/train:1"
PINNED = f"registry.example.com:5000/team/train@{DIGEST}"
VERSIONS = {
    "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    "Ray": "2.60.0",
    "raytide": "0.1.0",
    "user": str(os.getuid()),
}


@pytest.mark.parametrize("image", [IMAGE, PINNED, f"{IMAGE}@{DIGEST}", "localhost/raytide:cpu", "host:5000/a__b/c-d.e"])
def test_specs_take_references_with_their_registry(image: str) -> None:
    assert TrainSpec.parse({**TRAIN, "image": image}, where="x").image == image
    assert ScriptSpec.parse({"command": ["x"], "image": image}, where="x").image == image


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("", "image"),
        ("-v/:/host", "is no image such as"),
        ("--privileged", "is no image such as"),
        ("docker.io/-v", "is no image such as"),
        ("a.b/c d", "is no image such as"),
        ("a.b/c\n", "is no image such as"),
        ("a.b/c:1;reboot", "is no image such as"),
        ("a.b/$(reboot)", "is no image such as"),
        ("a.b/c:`id`", "is no image such as"),
        ("a.b/c'", "is no image such as"),
        ("a.b/c&&id", "is no image such as"),
        ("a.b/Upper", "is no image such as"),
        ("a.b/c@sha256:12", "is no image such as"),
        ("/a.b/c", "is no image such as"),
        ("../a.b/c", "is no image such as"),
        ("oci:/tmp/x", "is no image such as"),
        ("docker://a.b/c:1", "leave out docker://"),
        ("rayproject/ray:2.60.0", "names no registry: write docker.io/rayproject/ray:2.60.0"),
        ("python", "names no registry: write docker.io/python"),
        (f"a.b/{'c' * 600}", "image"),
    ],
)
def test_what_a_shell_or_podman_would_read_otherwise_is_refused(image: str, why: str) -> None:
    for parse, fields in ((TrainSpec.parse, TRAIN), (ScriptSpec.parse, {"command": ["x"]})):
        with pytest.raises(ConfigError, match=why):
            parse({**fields, "image": image}, where="x")


def test_a_login_in_a_reference_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        ScriptSpec.parse({"command": ["x"], "image": "ana:hush@a.b/c:1"}, where="x")
    assert "hush" not in str(refused.value)


def test_an_image_is_refused_beside_packages_and_where_it_cannot_work() -> None:
    for parse, fields in ((TrainSpec.parse, TRAIN), (ScriptSpec.parse, {"command": ["x"]})):
        with pytest.raises(ConfigError, match="image cannot be combined with pip: install the packages in the image"):
            parse({**fields, "image": IMAGE, "pip": ["peft"]}, where="x")
    with pytest.raises(ConfigError, match="image is for jobs of a cluster"):
        train_local(TrainSpec.parse({**TRAIN, "image": IMAGE}, where="train"))
    settings = RaytideSection(node_types={}, run_as="nobody")
    settings.check_image(None, "default", "script s")
    with pytest.raises(DeniedError, match=r"script s: the image .* would run as raytide's user"):
        settings.check_image(IMAGE, "default", "script s")
    RaytideSection(node_types={}).check_image(IMAGE, "default", "script s")


def test_jobs_stored_by_an_earlier_release_have_no_image() -> None:
    stored = ScriptSpec.parse({"command": ["x"]}, where="x").model_dump(mode="json")
    del stored["image"]
    assert ScriptSpec.parse(stored, where="x").image is None


@pytest.mark.parametrize("image", [IMAGE, f"registry.example.com:5000/team/train:1@{DIGEST}", PINNED])
def test_the_name_of_an_image_has_neither_tag_nor_digest(image: str) -> None:
    assert name_of(image) == "registry.example.com:5000/team/train"


DOWN = """time="2026-11-27T04:24:41Z" level=warning msg="Failed, retrying in 1s ... (3/3). Error: initializing source"
Error: initializing source docker://127.0.0.1:9/x:1: pinging container registry 127.0.0.1:9: Get "https://127.0.0.1:9/v2/": dial tcp 127.0.0.1:9: connect: connection refused
"""  # noqa: E501  # podman's own lines
RAYS = """Failed to set up runtime environment.
[Node 127.0.0.1] Traceback (most recent call last):
  File "ray/_private/runtime_env/image_uri.py", line 46, in _create_impl
    raise RuntimeError(
RuntimeError: Podman command failed: cmd=['podman', 'run', '--rm', '-v', '/tmp/tmpx:/shared:Z', 'a.b/c:1', 'python', '-c', "x"], returncode=125, stdout=, stderr=Trying to pull a.b/c:1...
"""  # noqa: E501  # Ray's own lines


@pytest.mark.parametrize("before", ["", RAYS])
@pytest.mark.parametrize(
    ("stderr", "error", "why"),
    [
        ("Error: reading manifest 1 in a.b/c: manifest unknown", ConfigError, "manifest unknown"),
        ("Error: reading manifest 1 in a.b/c: unauthorized", ConfigError, "podman login"),
        ("Error: reading manifest 1 in a.b/c: denied", ConfigError, "podman login"),
        ("Error: keep-id is only supported in rootless mode", ConfigError, "do not run as root"),
        (
            "Error: crun: executable file `python` not found in $PATH: No such file or directory: OCI runtime error",
            ConfigError,
            "needs `python` on its PATH",
        ),
        (DOWN, ImagePullError, "connection refused"),
        ("Error: reading manifest 1: toomanyrequests: You have reached your pull rate limit.", ImagePullError, "limit"),
        ("Error: received unexpected HTTP status: 503 Service Unavailable", ImagePullError, "503"),
        ("Error: received unexpected HTTP status: 500 Internal Server Error", ImagePullError, "500"),
        ("Error: initializing source docker://a.b/c:1: unexpected EOF", ImagePullError, "unexpected EOF"),
        ("Error: dial tcp: lookup registry.invalid on 10.0.0.1:53: no such host", ImagePullError, "no such host"),
        ("Error: writing blob: storing blob to file: no space left on device", ImagePullError, "no space left"),
    ],
)
def test_a_failure_that_may_pass_is_told_from_one_that_stays(
    before: str, stderr: str, error: type[Exception], why: str
) -> None:
    """The texts are those of podman 4.3 and of Ray 2.60 around them."""
    found = failure_of("a.b/c:1", before + stderr, 125)
    assert type(found) is error
    assert str(found).startswith("the image a.b/c:1 cannot be used on ") and why in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("output", "error", "why"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'podman'", ConfigError, "there is no podman"),
        (
            "Failed to install runtime_env within the timeout of 600 seconds. Consider\nasyncio.TimeoutError",
            ImagePullError,
            "within the timeout of 600 seconds",
        ),
        ("ValueError: Invalid worker path inferred in image a.b/c: x", ConfigError, "Invalid worker path"),
        ("", ConfigError, "podman ended with exit code 125"),
    ],
)
def test_ray_s_own_failures_have_a_class_too(output: str, error: type[Exception], why: str) -> None:
    found = failure_of("a.b/c", f"Failed to set up runtime environment.\n{output}" if output else "", 125)
    assert type(found) is error and why in str(found)


PODMAN = """#!{python}
import json, pathlib, sys
here = pathlib.Path({folder!r})
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((here / "answers").read_text())
code, out, err = answers.get(" ".join(sys.argv[1:3]), answers.get(sys.argv[1], [0, "", ""]))
print(out)
print(err, file=sys.stderr)
sys.exit(code)
"""


class FakePodman:
    """A `podman` that answers each command as told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: dict[str, tuple[int, str, str]] = {
            "info": (0, "overlay", ""),
            "image exists": (1, "", ""),
            "image inspect": (0, json.dumps([{"Id": "a1", "Digest": DIGEST}]), ""),
            "run": (0, f"a line of podman\n{json.dumps(VERSIONS)}", "a warning"),
        }
        program = folder / "podman"
        program.write_text(PODMAN.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o700)
        self.answer()

    def answer(self, **answers: tuple[int, str, str]) -> None:
        self.answers |= {name.replace("_", " "): given for name, given in answers.items()}
        (self.folder / "answers").write_text(json.dumps(self.answers))

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return found


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(images, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(images, "installed_version", {"ray": "2.60.0", "raytide": "0.1.0"}.__getitem__)
    return FakePodman(tmp_path)


def test_an_image_is_pulled_and_compared_once_and_named_by_its_digest(
    podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTIDE_NODE", "/nodes/n1")
    monkeypatch.setenv("RAYTIDE_CLUSTER", "/ana's")
    environment = prepare(IMAGE)
    assert environment == {
        "image_uri": PINNED,
        "env_vars": {"RAYTIDE_IMAGE": PINNED, "PYTHONUNBUFFERED": "1", "RAYTIDE_NODE": "/nodes/n1"},
    }
    calls = podman.calls()
    assert [call[0] for call in calls] == ["info", "image", "pull", "image", "run"]
    assert PINNED in calls[-1] and "--userns=keep-id" in calls[-1], "as Ray will start it"
    podman.answer(image_exists=(0, "", ""))
    assert prepare(IMAGE) == environment
    assert [call[:2] for call in podman.calls()] == [["info", "--format"], ["image", "exists"], ["image", "inspect"]]
    podman.answer(image_inspect=(0, json.dumps([{"Id": "b2", "Digest": f"sha256:{'1b' * 32}"}]), ""))
    assert prepare(PINNED)["image_uri"] == PINNED, "a digest that was asked for stays"
    assert podman.calls()[-1][0] == "run", "other content is compared again"


def test_the_environment_is_one_that_ray_accepts() -> None:
    """Ray refuses fields beside an image; those of the driver (its restriction) are variables too."""
    RuntimeEnv(image_uri=PINNED, env_vars={"RAYTIDE_IMAGE": PINNED})
    with pytest.raises(ValueError, match="'image_uri' field currently cannot be used together"):
        RuntimeEnv(image_uri=PINNED, pip=["peft"])


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ({"Ray": "2.49.1"}, "it has .*Ray 2.49.1, .*and the node .*Ray 2.60.0"),
        ({"Python": "3.8"}, "it has Python 3.8"),
        ({"raytide": ""}, "no raytide"),
        ({"user": "4711"}, "user 4711, and the node .*number of the nodes' user as its USER"),
        ({"Ray": "", "raytide": ""}, "no Ray, no raytide"),
    ],
)
def test_an_image_with_other_versions_is_refused_before_a_worker_starts(
    podman: FakePodman, inside: Mapping[str, str], why: str
) -> None:
    podman.answer(run=(0, json.dumps({**VERSIONS, **inside}), ""))
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"the image {IMAGE} cannot be used on .*: .*{why}"):
            prepare(IMAGE)


def test_a_node_that_runs_a_checkout_takes_any_raytide_and_an_image_without_one_is_refused(
    podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "installed_version", {"ray": "2.60.0", "raytide": None}.__getitem__)
    podman.answer(run=(0, json.dumps({**VERSIONS, "raytide": "0.9"}), ""))
    assert prepare(IMAGE)["image_uri"] == PINNED
    podman.answer(
        run=(0, json.dumps({**VERSIONS, "raytide": ""}), ""),
        image_inspect=(0, json.dumps([{"Id": "b2", "Digest": DIGEST}]), ""),
    )
    with pytest.raises(ConfigError, match="no raytide"):
        prepare(IMAGE)


def test_a_pull_that_fails_names_the_image_the_machine_and_podmans_reason(podman: FakePodman) -> None:
    podman.answer(pull=(125, "", "Error: reading manifest 1: manifest unknown"))
    with pytest.raises(ConfigError, match=r"cannot be used on .*: reading manifest 1: manifest unknown\. Correct"):
        prepare(IMAGE)
    podman.answer(pull=(125, "", DOWN))
    with pytest.raises(ImagePullError, match=r"connection refused\. It may pass"):
        prepare(IMAGE)
    podman.calls()
    with pytest.raises(ConfigError, match="not in podman's store there, and localhost/ is no registry"):
        prepare("localhost/mine:1")
    assert [call[0] for call in podman.calls()] == ["info", "image"], "nothing is pulled"


def test_a_node_whose_podman_copies_images_for_each_worker_is_named_before_anything_is_pulled(
    podman: FakePodman,
) -> None:
    podman.answer(info=(0, "vfs\n", ""))
    with pytest.raises(ConfigError, match="storage driver there is vfs, which copies the whole image") as refused:
        prepare(IMAGE)
    assert 'driver = "overlay"' in refused.value.hint
    assert [call[0] for call in podman.calls()] == ["info"]


def test_a_node_without_podman_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no podman\. Install podman on the nodes"):
        prepare(IMAGE)


class FakeRay:
    """Ray's tasks and actors, whose answers the test gives."""

    def __init__(self) -> None:
        self.prepared, self.answered = Future[Any](), Future[Any]()
        self.asked: list[object] = []
        self.started: list[dict[str, object]] = []
        self.is_started, self.killed = threading.Event(), 0

    def remote(self, *args: object) -> Any:
        self.asked.append(args[0] if args else None)
        return self

    def options(self, **_: object) -> Any:
        return self

    def future(self) -> Future[Any]:
        return self.prepared

    def start(self, **options: object) -> Any:
        self.started.append(options)
        answered = self.answered

        class Method:
            def remote(self) -> Any:
                return self

            def future(self) -> Future[Any]:
                return answered

        class Actor:
            ready = Method()

        self.is_started.set()
        return Actor()

    def kill(self, actor: object) -> None:
        self.killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr("ray.remote", fake.remote)
    monkeypatch.setattr("ray.kill", fake.kill)
    return fake


def test_a_worker_starts_in_the_image_by_its_digest_once_it_is_prepared(ray: FakeRay) -> None:
    actor = PreparedActor(ray.start, "here", image=IMAGE)
    answer = actor.call("ready")
    assert (ray.started, actor.image) == ([], "")
    environment = {"image_uri": PINNED, "env_vars": {}}
    ray.prepared.set_result(environment)
    ray.answered.set_result(7)
    assert answer.result(60) == 7
    assert ray.asked == [images.prepare, IMAGE]
    assert (ray.started, actor.image) == ([{"runtime_env": environment}], PINNED)
    actor.kill()
    assert ray.killed == 1


@pytest.mark.parametrize("kind", [ConfigError, ImagePullError])
def test_what_the_preparation_raised_is_the_answer_to_every_call(ray: FakeRay, kind: type[Exception]) -> None:
    actor = PreparedActor(ray.start, "here", image=IMAGE)
    early = actor.call("ready")
    ray.prepared.set_exception(kind("no such image"))
    assert type(early.exception(60)) is kind and type(actor.call("ready").exception(60)) is kind
    assert ray.started == []
    passed: Future[Any] = Future()
    pass_on(passed, early)
    assert type(passed.exception()) is kind, "of a script's member too"


def test_a_runtime_environment_that_ray_cannot_set_up_has_the_error_of_its_image(ray: FakeRay) -> None:
    actor = PreparedActor(ray.start, "here", image=IMAGE)
    ray.prepared.set_result({"image_uri": PINNED})
    ray.answered.set_exception(RuntimeEnvSetupError(f"{RAYS}Error: reading manifest 1: manifest unknown"))
    error = actor.call("ready").exception(60)
    assert isinstance(error, ConfigError) and "manifest unknown" in str(error)


def test_packages_keep_their_own_way(ray: FakeRay) -> None:
    actor = PreparedActor(ray.start, "here", pip=["peft"])
    ray.prepared.set_result("/env/bin/python")
    assert ray.is_started.wait(60)
    assert ray.started == [{"runtime_env": {"py_executable": "/env/bin/python"}}] and actor.image == ""
    assert ray.asked == [prepared_actor.interpreter_with, ["peft"]]
    plain = PreparedActor(ray.start, "here")
    ray.answered.set_exception(ClusterError("gone"))
    assert ray.started[-1] == {} and isinstance(plain.call("ready").exception(60), ClusterError)
