"""API tokens of jobs, which managed drivers and the processes of scripts use in place of a user's token.

A token is the job's id and its HMAC-SHA256 under a key that only raytide's own user can read. Tokens are not stored:
the API accepts them until the job is over.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from raytide.core.io.atomic_file import create_json, read_json

PREFIX = "rtjob_"
_FILE = "job_key.json"


def key_in(run_dir: Path) -> bytes:
    """Returns the cluster's key for job tokens. Creates it with mode 0600 if it is missing."""
    path = run_dir / _FILE
    record = read_json(path)
    if record is None:
        create_json(path, {"key": secrets.token_hex(32)})  # one of two concurrent processes writes it
        record = read_json(path)
        assert record is not None
    return bytes.fromhex(record["key"])


def token_of(job_id: str, key: bytes) -> str:
    return f"{PREFIX}{job_id}.{_code(job_id, key)}"


def job_named_by(token: str, key: bytes) -> str | None:
    """Returns the job of this token; None if it is not a job token or was made with another key."""
    job_id, _, code = token.removeprefix(PREFIX).rpartition(".")
    if not token.startswith(PREFIX) or not job_id:
        return None
    return job_id if hmac.compare_digest(code.encode("utf-8", "replace"), _code(job_id, key).encode()) else None


def _code(job_id: str, key: bytes) -> str:
    return hmac.new(key, f"raytide job {job_id}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()
