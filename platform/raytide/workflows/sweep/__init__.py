"""Sweeps: many variants of one stage; variants with bad results end early."""
