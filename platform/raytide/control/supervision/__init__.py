"""The processes of the control plane: the supervisor, daemons, the watcher of an owner, their logs."""
