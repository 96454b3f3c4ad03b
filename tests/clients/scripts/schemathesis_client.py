"""schemathesis: requests made from /openapi.json, every check but those that need a stateful API."""

import subprocess
import sys
from pathlib import Path

from features import URL, feature, run


@feature
def every_operation_of_the_schema():
    root = URL.removesuffix("/v1")
    command = [
        str(Path(sys.executable).with_name("st")), "run", f"{root}/openapi.json", "--url", root,
        "--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "16", "--request-timeout", "60",
        "--continue-on-failure", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:]


run()
