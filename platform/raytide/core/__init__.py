"""Floor 0: the nouns, contracts and small tools that every other part of raytide stands on.

Nothing here imports torch, ray or SQLAlchemy when it is imported.
"""
