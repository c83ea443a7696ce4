"""Plans run for real: one process per device, and what was predicted held against it."""
