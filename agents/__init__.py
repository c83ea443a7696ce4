"""Agents and planners on top of the simulator: what searches for a plan."""
