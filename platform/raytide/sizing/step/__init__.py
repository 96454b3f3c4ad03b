"""The seconds of a step, by term."""
