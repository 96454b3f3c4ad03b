"""Sweeps: many variants of one stage, of which those that do badly end early."""
