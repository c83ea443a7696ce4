"""Training runs that others published, predicted by the simulator.

`rows` reads them, `models` captures what they trained, `clusters` and `plans` say where and how,
`assumptions` what their sources leave open, `prediction` puts it together, `score` holds it
against what was measured.
"""
