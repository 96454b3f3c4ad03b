"""The replicas behind the gateway: their addresses, the choice of one for each request, and recovery
when it is lost.
"""
