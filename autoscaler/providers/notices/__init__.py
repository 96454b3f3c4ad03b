"""Notices of the clouds: they are told to the machine, so each node has a watcher, which tells raytide's controller."""
