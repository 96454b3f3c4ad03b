"""Own machines, and the words for what work needs of a machine."""
