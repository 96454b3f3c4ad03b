"""The places of one cluster's backup: the run folder and state that are saved, the repositories, and the work
folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from raytide.control.backup.repository import Repository
from raytide.control.backup.results import work_dir_of
from raytide.control.bootstrap.cluster_record import load, run_dir_of
from raytide.core.config import home
from raytide.core.errors import ConfigError, NotFoundError
from raytide.core.objects.cluster_config import BackupSection, load_cluster

CONFIG = "cluster.yaml"


@dataclass(frozen=True, slots=True)
class BackupPlace:
    """The run folder, the state database and the settings of a cluster whose configuration asks for backups."""

    cluster: str
    run_dir: Path
    state_url: str
    settings: BackupSection

    @property
    def work_dir(self) -> Path:
        return work_dir_of(self.cluster)

    @property
    def hot(self) -> Repository:
        return self._at(self.settings.repository)

    @property
    def cold(self) -> Repository | None:
        url = self.settings.cold_repository
        return self._at(url) if url else None

    def _at(self, url: str) -> Repository:
        file = self.settings.environment_file
        environment_file = Path(file).expanduser() if file else None
        found = repository_at(url, self.settings.password_file)
        return replace(found, environment_file=environment_file, sftp=self.settings.sftp)


def place_of(cluster: str) -> BackupPlace:
    """Returns the run folder, the state database and the backup settings of a cluster on this machine. The cluster need
    not be running. Raises NotFoundError if the cluster has no run folder. Raises ConfigError if the cluster's
    configuration has no `backup` section.
    """
    run_dir = run_dir_of(cluster)
    config_path = run_dir / CONFIG
    if not config_path.exists():
        raise NotFoundError(
            f"there is no cluster {cluster} on this machine.",
            hint="To restore a lost one, name its repository: --repository R --password-file F.",
        )
    settings = load_cluster(config_path).settings
    if settings.backup is None:
        raise ConfigError(
            f"{config_path} has no metadata.raytide.backup.",
            hint="Add `backup: {repository: ..., password_file: ...}`; docs/backup.md describes both.",
        )
    record = load(run_dir)
    state_url = settings.state_url or f"sqlite:///{run_dir / 'state.db'}"
    return BackupPlace(cluster, run_dir, state_url if record is None else record.state_url, settings.backup)


def repository_at(url: str, password_file: str) -> Repository:
    """Returns the repository at a path or a restic URL. A leading `~` stands for this user's home."""
    where = str(Path(url).expanduser()) if url.startswith("~") else url
    return Repository(where, Path(password_file).expanduser(), home().resolve() / "backup" / ".cache")
