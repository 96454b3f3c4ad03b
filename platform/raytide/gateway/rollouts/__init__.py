"""Rollouts in the gateway: the choice of the revision that answers a request, and the counts of each revision's
requests.
"""
