"""Messages about alerts: the times at which they are due, and the format of each kind of receiver."""
