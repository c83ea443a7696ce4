"""The classical planners, one file each, behind one interface: `agents.planners.space.Planner`."""
