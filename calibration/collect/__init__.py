"""Measurements of this machine -> records, and from them the profiles of the cluster ``local``."""
