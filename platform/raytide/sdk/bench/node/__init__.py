"""Types of nodes measured before they are used: a job of the queue times memory, matrix products, network and disk."""
