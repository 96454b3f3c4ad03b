"""Simulates raytide's queue policy and baseline policies on recorded jobs."""
