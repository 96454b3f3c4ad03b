"""Messages about alerts: the times at which they are due, and the format for each type of receiver."""
