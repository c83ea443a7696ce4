"""Speed and quality studies; never part of the test run."""
