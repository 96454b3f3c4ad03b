"""A restic repository, used through the program `restic`.

restic cuts files into chunks, encrypts them and stores each distinct chunk once. Each snapshot is complete for readers
and incremental in storage. restic writes the snapshot's own file last, so a killed backup leaves only unused chunks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from raytide.core.errors import ConfigError, NotFoundError, StorageError
from raytide.core.io.environment import NAME_PATTERN
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.cluster_config import SftpSection

HOW_TO_INSTALL = "Debian and Ubuntu: apt-get install restic. In a checkout, ./dev setup fetches it."
TAG = "raytide"
_QUERY_S, _TRANSFER_S = 600.0, 86_400.0
"""The time limits of commands that read a repository's index, and of those that move data."""
_NO_SNAPSHOT = "no matching ID found"
_INCOMPLETE = 3
"""restic's exit code if the snapshot that it saved lacks files that it could not read."""
_TAIL = 600
_SFTP = re.compile(r"^sftp:(?://)?(?:(?P<user>[^@/:]+)@)?(?P<host>\[[^\]]+\]|[^/:]+)(?::(?P<port>\d+)(?=/))?[:/]")
"""The forms `sftp:user@host:/path` and `sftp://user@host:port/path`."""


@dataclass(frozen=True, slots=True)
class RepositorySnapshot:
    """A snapshot as the repository lists it."""

    id: str
    at_s: float
    cluster: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """The result of one backup."""

    snapshot: str
    files: int
    bytes: int
    """The size of the files."""
    added_bytes: int
    """The size of the chunks that the repository did not have, before their compression."""


def find_restic() -> str:
    """Returns the path of the program restic. Searches the PATH first. Then searches the folder into which `./dev
    setup` unpacks restic in a checkout. Raises ConfigError if restic is in neither place.
    """
    unpacked = str(Path(sys.prefix) / "tools" / "bin")
    found = shutil.which("restic") or shutil.which("restic", path=unpacked)
    if found is None:
        raise ConfigError("restic is not installed, and backups need it.", hint=HOW_TO_INSTALL)
    return found


def read_environment(file: Path) -> dict[str, str]:
    """Returns the variables of a file with lines NAME=VALUE. Empty lines and comments are skipped.

    Raises ConfigError if the file cannot be read, belongs to another user, or may be read by others. Also raises
    ConfigError if a line has another form, or if a name begins with RESTIC_.
    """
    try:
        about, text = file.stat(), file.read_text()
    except OSError as error:
        raise ConfigError(f"the environment file {file} cannot be read: {error.strerror}.") from None
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"others may read {file}, which holds secrets.", hint=f"Run `chmod 600 {file}` as its owner.")
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals or not re.match(NAME_PATTERN, name) or name.startswith("RESTIC_"):
            raise ConfigError(f"{file}, line {number}: not a variable that may be set.", hint="Write NAME=VALUE.")
        found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at a path or a URL that restic knows (`s3:...`, `sftp:...`), with the file of its password.

    restic gets the URL and all secrets in its environment, never as arguments, because other users can see the
    arguments of a process.
    """

    url: str
    password_file: Path
    cache_dir: Path
    environment_file: Path | None = None
    sftp: SftpSection | None = None

    @property
    def shown_url(self) -> str:
        """The URL without a password."""
        return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", self.url)

    def init(self, like: Repository | None = None) -> bool:
        """Creates the repository. Returns False if it exists already. With `like`, the new repository cuts files at the
        same places as the repository `like`, so that copied snapshots share their chunks.

        Raises StorageError if the repository exists with another password.
        """
        if self._call(["cat", "config"], timeout_s=_QUERY_S).returncode == 0:
            return False
        more = [] if like is None else ["--copy-chunker-params"]
        self._checked(["init", *more], "cannot be created", other=like)
        return True

    def backup(
        self,
        paths: Sequence[Path],
        *,
        cluster: str,
        list_file: Path,
        exclude: Sequence[str] = (),
        parent: str = "",
        may_vanish: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> BackupSummary:
        """Saves these paths as one snapshot. Files that are unchanged since the snapshot `parent` are not read again.
        If no parent is given, or if the parent was removed, the cluster's newest snapshot is the parent.

        The paths are passed to restic in the file `list_file`. Files below the paths in `may_vanish` may be removed
        during the backup. If the snapshot lacks any other file, the snapshot is removed and StorageError is raised.
        restic inherits the file descriptors `pass_fds`.
        """
        with full_disk_is_an_error(str(list_file)):
            list_file.write_text("".join(f"{path}\n" for path in paths))
        command = ["backup", "--json", "--quiet", "--host", cluster, "--tag", TAG, "--files-from-verbatim"]
        command += [str(list_file), *(f"--exclude={pattern}" for pattern in exclude)]
        command.append("--ignore-ctime")  # a link changes it
        done = self._backup(command, self._parent(parent, cluster), pass_fds)
        if parent and _NO_SNAPSHOT in done.stderr:
            done = self._backup(command, self._parent("", cluster), pass_fds)
        summary = next((line for line in _json_lines(done.stdout) if line.get("message_type") == "summary"), None)
        if summary is not None and (done.returncode == 0 or has_all(done, may_vanish)):
            return BackupSummary(
                str(summary["snapshot_id"])[:8],
                int(summary["total_files_processed"]),
                int(summary["total_bytes_processed"]),
                int(summary["data_added"]),
            )
        if done.returncode == _INCOMPLETE and summary is not None:
            self.remove(str(summary["snapshot_id"]))
        raise self._failed("has no new snapshot", done)

    def _parent(self, wanted: str, cluster: str) -> str:
        """Returns the snapshot whose unchanged files are not read again: `wanted`, unless the repository lacks it, or
        the cluster's newest; empty if there is none. The files of a repository on this machine answer without restic,
        which takes a second to open one."""
        folder = Path(self.url) / "snapshots"
        known = [file.name for file in folder.iterdir()] if folder.is_dir() else None
        if known == []:
            return ""
        if wanted and (known is None or any(name.startswith(wanted) for name in known)):
            return wanted
        return next((each.id for each in reversed(self.snapshots(cluster))), "")

    def _backup(self, command: Sequence[str], parent: str, pass_fds: Sequence[int]) -> subprocess.CompletedProcess[str]:
        more = ["--parent", parent] if parent else []
        return self._call([*command, *more], timeout_s=_TRANSFER_S, pass_fds=pass_fds)

    def remove(self, snapshot: str) -> None:
        """Removes a snapshot from the list. Its data stays in the repository until the next `forget`, so a new snapshot
        can reuse the data."""
        self._checked(["forget", snapshot], "kept an incomplete snapshot")

    def snapshots(self, cluster: str | None = None) -> tuple[RepositorySnapshot, ...]:
        """Returns raytide's snapshots, oldest first. Raises NotFoundError if the repository does not exist."""
        command = ["snapshots", "--json", "--tag", TAG, *([] if cluster is None else ["--host", cluster])]
        found = json.loads(self._checked(command, "cannot be read").stdout or "null") or []
        listed = (
            RepositorySnapshot(
                str(each["short_id"]),
                datetime.fromisoformat(_to_microseconds(each["time"])).timestamp(),
                str(each["hostname"]),
                tuple(each["paths"]),
            )
            for each in found
        )
        return tuple(sorted(listed, key=lambda each: each.at_s))

    def restore(self, snapshot: str, target: Path, *, include: Sequence[str] = ()) -> tuple[str, ...]:
        """Writes a snapshot's files below `target`, under their absolute paths. Returns restic's errors, which are
        empty if all files were restored.

        All data is read from the repository, not from restic's cache. restic compares the data with the hashes in
        the repository.
        """
        command = ["restore", snapshot, "--target", str(target), "--no-cache"]
        return _problems(self._call([*command, *(f"--include={path}" for path in include)], timeout_s=_TRANSFER_S))

    def check(self, part: int | None = None, parts: int = 1) -> tuple[str, ...]:
        """Returns the problems of the repository's structure. With `part`, also reads one part of the data and returns
        the problems of that part. The data is divided into `parts` parts, which are counted from 1.
        """
        command = ["check", *([] if part is None else [f"--read-data-subset={part}/{parts}"])]
        return _problems(self._call(command, timeout_s=_TRANSFER_S))

    def forget(self, cluster: str, keep: Mapping[str, int]) -> tuple[int, int]:
        """Removes the snapshots to which no rule in `keep` applies. Also removes the data that only those snapshots
        use.

        Returns the number of snapshots that were kept, and the number of snapshots that were removed. The newest
        snapshot is always kept. If there are no rules, all other snapshots are removed.
        """
        rules = [f"--keep-{name}={count}" for name, count in keep.items() if count]
        command = ["forget", "--json", "--prune", "--tag", TAG, "--host", cluster, "--group-by", "host"]
        done = self._checked([*command, *(rules or ["--keep-last=1"])], "was not cleaned", timeout_s=_TRANSFER_S)
        groups = next((each for each in map(_json, done.stdout.splitlines()) if isinstance(each, list)), [])
        sizes = [(len(each.get("keep") or ()), len(each.get("remove") or ())) for each in groups]
        return sum(kept for kept, _ in sizes), sum(removed for _, removed in sizes)

    def copy_from(self, other: Repository, snapshots: Sequence[str]) -> None:
        """Copies snapshots from another repository. Snapshots that this repository has already are skipped."""
        self._checked(["copy", *snapshots], "did not take the copy", timeout_s=_TRANSFER_S, other=other)

    def _checked(
        self, command: Sequence[str], what: str, *, timeout_s: float = _QUERY_S, other: Repository | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs restic and returns the completed process. If restic fails, raises an error that `what` describes."""
        done = self._call(command, timeout_s=timeout_s, other=other)
        if done.returncode != 0:
            raise self._failed(what, done)
        return done

    def _call(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        pass_fds: Sequence[int] = (),
        other: Repository | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs restic, and runs it again if the lock of a dead process stopped it. restic may read from an `other`
        repository."""
        done = self._run(command, timeout_s, pass_fds, other)
        if done.returncode != 0 and "already locked" in done.stderr and command[0] != "unlock":
            self._run(["unlock"], _QUERY_S, (), None)
            done = self._run(command, timeout_s, pass_fds, other)
        return done

    def _run(
        self, command: Sequence[str], timeout_s: float, pass_fds: Sequence[int], other: Repository | None
    ) -> subprocess.CompletedProcess[str]:
        if not self.password_file.is_file():
            raise ConfigError(
                f"the password file {self.password_file} does not exist.",
                hint="`raytide backup init` writes one; keep a copy of it outside of the cluster.",
            )
        self.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = [] if "--no-cache" in command else ["--cache-dir", str(self.cache_dir)]
        if (ssh := self._ssh_command() or (other._ssh_command() if other is not None else None)) is not None:
            options += ["--option", f"sftp.command={ssh}"]
        try:
            return subprocess.run(
                [find_restic(), *options, *command],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
                env=self._environment(other),
                pass_fds=pass_fds,
            )
        except subprocess.TimeoutExpired:
            raise StorageError(
                f"`restic {command[0]}` took longer than {timeout_s:.0f} s with the repository {self.shown_url}.",
                hint="Check the network and the store; the next run goes on with what was stored.",
            ) from None
        except OSError as error:
            raise StorageError(f"restic cannot be run: {error}.", hint=HOW_TO_INSTALL) from error

    def _environment(self, other: Repository | None) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if not name.startswith("RESTIC_")}
        for each in (other, self):
            if each is not None and each.environment_file is not None:
                found |= read_environment(each.environment_file)
        found |= {"RESTIC_REPOSITORY": self.url, "RESTIC_PASSWORD_FILE": str(self.password_file)}
        if other is not None:
            found |= {"RESTIC_FROM_REPOSITORY": other.url, "RESTIC_FROM_PASSWORD_FILE": str(other.password_file)}
        return found

    def _ssh_command(self) -> str | None:
        """Returns the ssh command for an `sftp:` repository; None without `sftp` settings: restic then runs the user's
        ssh."""
        place = _SFTP.match(self.url)
        if self.sftp is None or place is None:
            return None
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(Path(self.sftp.known_hosts).expanduser()),
            "GlobalKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "ServerAliveInterval": "15",
        }
        flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        who = ["-i", str(Path(self.sftp.key).expanduser())]
        who += ["-p", place["port"]] if place["port"] else []
        who += ["-l", place["user"]] if place["user"] else []
        return shlex.join(["ssh", "-F", "none", *flags, *who, place["host"].strip("[]"), "-s", "sftp"])

    def _failed(self, what: str, done: subprocess.CompletedProcess[str]) -> StorageError | NotFoundError:
        said = (
            " ".join(done.stderr.replace(self.url, self.shown_url).split())[-_TAIL:] or f"exit code {done.returncode}"
        )
        if "Is there a repository at" in done.stderr or "repository does not exist" in done.stderr:
            return NotFoundError(
                f"there is no backup repository at {self.shown_url}.", hint="`raytide backup init` creates it."
            )
        if "wrong password" in done.stderr:
            return StorageError(
                f"the password in {self.password_file} does not open the repository {self.shown_url}.",
                hint="Use the password file that the repository was created with.",
            )
        hint = "`raytide backup drill` shows whether the repository is damaged (docs/runbooks)."
        if "already locked" in done.stderr:
            hint = "Another machine works on it. Wait for it, or see docs/runbooks/damaged-repository.md."
        return StorageError(f"the backup repository {self.shown_url} {what}: {said}.", hint=hint)


def has_all(done: subprocess.CompletedProcess[str], may_vanish: Sequence[str]) -> bool:
    """Returns True if a snapshot lacks only files that were removed during the backup and were below a path in
    `may_vanish`."""
    lost = [Path(str(each.get("item"))) for each in _json_lines(done.stderr) if each.get("message_type") == "error"]
    allowed = [Path(folder) for folder in may_vanish]
    return (
        done.returncode == _INCOMPLETE
        and bool(lost)
        and all(not os.path.lexists(path) and any(path.is_relative_to(each) for each in allowed) for path in lost)
    )


def _problems(done: subprocess.CompletedProcess[str]) -> tuple[str, ...]:
    """Returns the lines with which restic explains its failure; empty if it succeeded."""
    if done.returncode == 0:
        return ()
    return tuple(line for line in done.stderr.splitlines() if line.strip()) or ("restic failed",)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _json_lines(text: str) -> list[dict[str, Any]]:
    return [found for line in text.splitlines() if isinstance(found := _json(line), dict)]


def _to_microseconds(time: str) -> str:
    """Returns restic's time, which has nanoseconds, cut to the microseconds that Python reads."""
    head, _, rest = time.partition(".")
    digits = rest.rstrip("Z").partition("+")[0].partition("-")[0]
    return f"{head}.{digits[:6]:0<6}{'+00:00' if rest.endswith('Z') else rest[len(digits) :]}" if rest else time
