"""The API: HTTP with a token, the only interface of the SDK, the CLI and drivers to a cluster.

Run as `python -m raytide.control.api RUN_DIR`.
"""
