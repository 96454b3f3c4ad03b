"""The commands `backup` and `resume`.

`backup` makes snapshots of a cluster in a restic repository, restores them, and drills a restore. `resume` lets a
restored controller act.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_list, as_result, local_time
from raytide.core.config import environment
from raytide.core.errors import StorageError, UsageError, WaitTimeoutError
from raytide.core.io.atomic_file import write_text
from raytide.core.io.storage import full_disk_is_an_error

if TYPE_CHECKING:
    from raytide.control.backup.place import BackupPlace
    from raytide.control.backup.repository import Repository

backups = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Back a cluster up, restore it, and prove that it can be restored.",
)
Cold = Annotated[bool, typer.Option("--cold", help="Use the cold repository.")]
RepositoryUrl = Annotated[
    str | None, typer.Option("--repository", help="A repository, where no cluster of this machine names one.")
]
PasswordFile = Annotated[str | None, typer.Option("--password-file", help="The file with the repository's password.")]


@backups.command()
def init(cluster: ClusterName = None, json: Json = False) -> None:
    """Create the repositories that cluster.yaml names, and a password file if there is none."""
    from raytide.control.backup.upkeep import create_repositories

    place = _place(cluster)
    is_new = _write_password(place.hot.password_file)
    created = [repository.shown_url for repository in create_repositories(place)]
    if json:
        as_json({"created": created, "password_file": str(place.hot.password_file), "password_is_new": is_new})
        return
    print("\n".join(f"created {url}" for url in created) or "the repositories exist")
    if is_new:
        print(f"{place.hot.password_file} is new: keep a copy of it outside of the cluster, or backups cannot be read")


@backups.command()
def run(cold: Cold = False, cluster: ClusterName = None, json: Json = False) -> None:
    """Make a snapshot now. With --cold, copy the newest snapshot to the cold repository instead."""
    from raytide.control.backup.run import back_up
    from raytide.control.backup.upkeep import copy_to_cold

    place = _place(cluster)
    if cold:
        copied = copy_to_cold(place)
        where = "" if place.cold is None else place.cold.shown_url
        as_result({"snapshot": copied, "repository": where}, f"snapshot {copied} is in {where}", json)
        return
    manifest, summary = back_up(place)
    contents = manifest.contents
    if json:
        as_json({**asdict(summary), "at_s": manifest.at_s, **contents.model_dump(mode="json")})
        return
    print(
        f"snapshot {summary.snapshot}: {summary.files} files, {_size(summary.bytes)}, {_size(summary.added_bytes)} new"
    )
    for url in contents.remote:
        print(f"not copied, as it is in an object store: {url}")
    for path in contents.missing:
        print(f"warning: it is named but not there, or not whole: {path}")


@backups.command("list")
def list_snapshots(
    cold: Cold = False,
    repository: RepositoryUrl = None,
    password_file: PasswordFile = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List the snapshots, oldest first."""
    source = _repository(repository, password_file, cluster, is_cold=cold)
    found = source.snapshots(_cluster_in(repository, cluster))
    as_list(found, ("SNAPSHOT", "AT", "CLUSTER"), lambda each: (each.id, local_time(each.at_s), each.cluster), json)


@backups.command()
def restore(
    snapshot: Annotated[str, typer.Argument(help="The id of a snapshot.")] = "latest",
    name: Annotated[str | None, typer.Option(help="The name of the restored cluster; its own by default.")] = None,
    to: Annotated[Path | None, typer.Option(help="Only write the files below this new folder.")] = None,
    state_url: Annotated[
        str | None, typer.Option(help="A new store for the state, in place of that in its cluster.yaml.")
    ] = None,
    cold: Cold = False,
    repository: RepositoryUrl = None,
    password_file: PasswordFile = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Restore a lost cluster. Its controller then does nothing until `raytide resume`."""
    from raytide.control.backup.restore import find_snapshot, restore_cluster, unpack
    from raytide.control.bootstrap.cluster_record import run_dir_of

    source = _repository(repository, password_file, cluster, is_cold=cold)
    chosen = find_snapshot(source, _cluster_in(repository, cluster), snapshot)
    if to is not None:
        if to.exists():
            raise UsageError(f"{to} exists.", hint="Name a new folder.")
        unpacked = unpack(source, chosen, to.absolute())
        problems = unpacked.problems
        if json:
            as_json({"snapshot": chosen.id, "at_s": unpacked.manifest.at_s, "to": str(to), "problems": problems})
        else:
            print(f"snapshot {chosen.id} of {local_time(unpacked.manifest.at_s)} is below {to}")
    else:
        restored = restore_cluster(source, chosen, run_dir_of(name or chosen.cluster), state_url=state_url)
        problems = restored.problems
        if json:
            as_json(restored)
        else:
            at = f"{local_time(restored.at_s)} (snapshot {restored.snapshot})"
            print(f"cluster {restored.run_dir.name} is as it was at {at}")
            print(f"folders that are there and whole: {', '.join(restored.folders) or 'none'}")
            print(f"start it with {restored.run_dir / 'cluster.yaml'}; it does nothing until `raytide resume`")
    if problems:
        raise StorageError(
            f"not everything was restored: {'; '.join(problems)}",
            hint="Take it from an earlier snapshot: `raytide backup restore ID --to FOLDER`.",
        )


@backups.command()
def drill(cold: Cold = False, cluster: ClusterName = None, json: Json = False) -> None:
    """Restore the newest snapshot into a scratch folder, check the restored state, and measure the time to restore.

    The exit code is 1 if anything is wrong.
    """
    from raytide.control.backup.drill import drill as run_drill

    found = run_drill(_place(cluster), is_cold=cold)
    if json:
        as_json(found.model_dump(mode="json"))
    else:
        answering = f" and answering after {found.restore_s:.1f} s" if found.restore_s else ""
        print(f"snapshot {found.snapshot}: {_size(found.bytes)} restored{answering}")
        print(f"a loss of the head at the start would have cost {found.lost_s:.0f} s of changes")
        for why in found.skipped:
            print(f"not checked: {why}")
    if found.problems:
        raise StorageError(
            f"the backup has {len(found.problems)} problems: {'; '.join(found.problems)}",
            hint="See docs/runbooks/damaged-repository.md.",
        )
    if not json:
        print("everything in it is whole")


@backups.command()
def forget(cluster: ClusterName = None, json: Json = False) -> None:
    """Remove the snapshots that the retention rule does not keep, and their data."""
    from raytide.control.backup.upkeep import forget as remove

    kept, removed = remove(_place(cluster))
    as_result({"kept": kept, "removed": removed}, f"{kept} snapshots are kept, {removed} were removed", json)


def resume(cluster: ClusterName = None, json: Json = False) -> None:
    """Let a restored controller act again. The controller first reads the provider's list of machines, and corrects its
    records accordingly.
    """
    from raytide.control.client import ApiClient

    api = ApiClient.find(cluster)
    body = {"id": f"cli-{secrets.token_hex(8)}", "kind": "resume", "subject": api.status().name}
    order = api.call("POST", "/v1/orders", body)
    deadline = time.monotonic() + _RESUME_S
    while order["done_at_s"] is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        order = api.call("GET", f"/v1/orders/{order['id']}")
    if order["done_at_s"] is None:
        raise WaitTimeoutError(
            f"the controller did not go on within {_RESUME_S:.0f} s; it will, as soon as it can.",
            hint="`raytide status` says what it waits for.",
        )
    as_result(order, f"the cluster goes on; {order['outcome']}", json)


_RESUME_S, _POLL_S = 60.0, 0.2


def _place(cluster: str | None) -> BackupPlace:
    from raytide.control.backup.place import place_of

    return place_of(cluster or environment("CLUSTER_NAME") or "local")


def _repository(url: str | None, password_file: str | None, cluster: str | None, *, is_cold: bool) -> Repository:
    """Returns the repository that the options name, else the hot or cold one of a cluster of this machine."""
    from raytide.control.backup.place import repository_at

    if (url is None) != (password_file is None):
        raise UsageError("--repository and --password-file belong together.", hint="Give both, or neither.")
    if url is not None and password_file is not None:
        return repository_at(url, password_file)
    place = _place(cluster)
    if not is_cold:
        return place.hot
    if place.cold is None:
        raise UsageError("there is no cold repository.", hint="Set metadata.raytide.backup.cold_repository.")
    return place.cold


def _cluster_in(repository: str | None, cluster: str | None) -> str | None:
    """Returns the name of the cluster whose snapshots to use; None for all clusters' snapshots in the named
    repository."""
    return cluster if repository is not None else _place(cluster).cluster


def _write_password(file: Path) -> bool:
    """Writes a new random password to the file; returns False if the file exists."""
    if file.exists():
        return False
    with full_disk_is_an_error(str(file)):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(file, secrets.token_urlsafe(32) + "\n")
    return True


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
