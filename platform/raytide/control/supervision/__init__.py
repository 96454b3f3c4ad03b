"""The processes of the control plane: the supervisor, other long-lived processes, and their logs."""
