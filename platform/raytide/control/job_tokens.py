"""API tokens of jobs: for a managed driver and the processes of a script, instead of anybody's own token.

A token is the job's id with a code over it (HMAC-SHA256) under a key that only raytide's own user can read. Nothing is
stored for it: the API takes it for as long as the job is not over.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from raytide.core.io.atomic_file import create_json, read_json

__all__ = ["PREFIX", "job_named_by", "key_in", "token_of"]

PREFIX = "rtjob_"
_FILE = "job_key.json"


def key_in(run_dir: Path) -> bytes:
    """The cluster's key for the tokens of its jobs; made, with mode 0600, when there is none yet."""
    path = run_dir / _FILE
    record = read_json(path)
    if record is None:
        create_json(path, {"key": secrets.token_hex(32)})  # of two processes that find none, one writes it
        record = read_json(path)
        assert record is not None
    return bytes.fromhex(record["key"])


def token_of(job_id: str, key: bytes) -> str:
    return f"{PREFIX}{job_id}.{_code(job_id, key)}"


def job_named_by(token: str, key: bytes) -> str | None:
    """The job whose token this is; None when it is no job's, or was not made with this key."""
    job_id, _, code = token.removeprefix(PREFIX).rpartition(".")
    if not token.startswith(PREFIX) or not job_id:
        return None
    return job_id if hmac.compare_digest(code.encode("utf-8", "replace"), _code(job_id, key).encode()) else None


def _code(job_id: str, key: bytes) -> str:
    return hmac.new(key, f"raytide job {job_id}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()
