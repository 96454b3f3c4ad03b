"""`python -m raytide.cli` is the `raytide` command."""

from raytide.cli import main

main()
