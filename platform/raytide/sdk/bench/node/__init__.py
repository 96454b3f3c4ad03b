"""Measures types of nodes before they are used: a job in the queue times memory, matrix products, network and disk."""
