"""Ray Serve: the deployment of replicas, their control, and the scaling policy."""
