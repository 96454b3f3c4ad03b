"""What every node cost and whose that was, to the micro-dollar: entries per interval, and their check against the bill."""
