"""Interruption notices. Clouds give them to the machine itself, so a watcher on each node passes them on."""
