"""The API: HTTP with a token, the only door for the SDK, the CLI and drivers.

Run as `python -m raytide.control.api RUN_DIR`.
"""
