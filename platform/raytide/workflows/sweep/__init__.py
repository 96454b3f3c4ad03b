"""Sweeps: variants of one stage, of which those with bad results end early."""
