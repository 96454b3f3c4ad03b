"""In-memory snapshots on other ranks (as in Gemini, SOSP 2023), which survive the loss of a node without storage."""
