"""Frontends: a model or a file in, an `OpGraph` out. Nothing is executed from a data file."""
