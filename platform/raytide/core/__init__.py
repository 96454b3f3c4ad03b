"""The objects, protocols and small tools that every other part of raytide uses.

Nothing here imports torch, ray or SQLAlchemy when it is imported.
"""
