"""The part that runs in Ray Serve: the deployment of replicas, the control of the deployment, and the scaling
policy.
"""
