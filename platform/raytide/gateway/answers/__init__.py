"""Answers without a new computation: requests that share the running computation of an equal request, and cached
answers.
"""
