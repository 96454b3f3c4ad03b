"""The provider for Kubernetes, through KubeRay."""
