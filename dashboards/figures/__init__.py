"""Figures of everything that raytide measures, drawn with matplotlib. They are static and need neither scripts nor
network.
"""
