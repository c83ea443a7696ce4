"""Sharding: what may be split, what one decision forces, and what a device then does."""
