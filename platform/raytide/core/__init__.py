"""The objects, protocols and small tools that every other part of raytide uses.

Importing these modules does not import torch, ray or SQLAlchemy.
"""
