"""API tokens of jobs. Managed drivers and the processes of scripts use them instead of a user's token.

A token consists of the job's id and the id's HMAC-SHA256 under a key that only raytide's own user can read. Tokens are
not stored. The API accepts a token until its job is over.
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
    """Returns the key for job tokens in this folder. If there is no key yet, creates it in a file with mode 0600."""
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
    """Returns the id of the job whose token this is. Returns None if the text is not a job token, or was made with
    another key."""
    job_id, _, code = token.removeprefix(PREFIX).rpartition(".")
    if not token.startswith(PREFIX) or not job_id:
        return None
    return job_id if hmac.compare_digest(code.encode("utf-8", "replace"), _code(job_id, key).encode()) else None


def _code(job_id: str, key: bytes) -> str:
    return hmac.new(key, f"raytide job {job_id}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()
