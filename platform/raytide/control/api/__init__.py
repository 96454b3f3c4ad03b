"""The API: HTTP with a token. The SDK, the CLI and drivers use a cluster only through it.

Run as `python -m raytide.control.api RUN_DIR`.
"""
