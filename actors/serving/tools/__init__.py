"""Tool calls: how models write them, the calls in a model's output, and the constraint that makes every call parse."""
