"""The command line, a thin client of the API.

Exit codes: 0 ok, 1 error, 2 usage, 3 quota or budget, 4 not found, 5 timeout.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the `raytide` command and turns errors into exit codes."""
    from raytide.core.errors import RaytideError

    try:
        from raytide.cli.app import app

        app()
    except RaytideError as error:
        print(f"raytide: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("raytide: interrupted", file=sys.stderr)
        sys.exit(130)
