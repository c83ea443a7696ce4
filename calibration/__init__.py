"""Calibration: measurements in, hardware profiles out; and plans run for real."""
