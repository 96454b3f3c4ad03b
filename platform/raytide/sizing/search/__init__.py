"""The layouts that could be used, the plans that they make, and what would make one fit."""
