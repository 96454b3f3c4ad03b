"""The replicas behind the gateway: their addresses, the choice of a replica for each request, and the recovery of
requests whose replica is lost.
"""
