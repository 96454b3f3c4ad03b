"""Messages about alerts: when one is due, and how each kind of receiver gets it."""
