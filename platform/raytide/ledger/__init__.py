"""What every node cost and whose that was, to the micro-dollar; pure functions over core's entries and intervals."""
