"""Sweeps run variants of one stage. Variants with bad results end early."""
