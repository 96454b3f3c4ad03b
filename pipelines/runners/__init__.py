"""Runners of a build's stages: in this process, or on the members of a gang."""
