"""Pipelines whose stages form a DAG: the space of plans, its masks, rewards, bound, searches."""
