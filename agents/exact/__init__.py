"""Exact planners, and the published planners' programs under their own objectives."""
