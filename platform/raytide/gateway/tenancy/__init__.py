"""Who sends a request to the gateway, what they may use of it, and what it cost them."""
