"""Runners of a build's stages: they run in this process, or on the members of a gang."""
