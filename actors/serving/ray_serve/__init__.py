"""Ray Serve: the deployment of replicas, their control, the proxy in front and the scaling policy."""
