"""A gang's driver in a process of its own: `python holder.py RUN_DIR JOB_ID`. It holds its lease until it is killed."""

from __future__ import annotations

import sys
import time

from raytide.actors.gang import Gang
from raytide.control.client import ApiClient


def main(run_dir: str, job_id: str) -> None:
    with Gang(ApiClient.from_run_dir(run_dir), job_id):
        time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
