"""Arms of EAGLE and Mars for ``python -m bench.learners --methods``: one choice changed at a time.

`mars_imitate` simulates 300 placements more than its budget says: those of its teacher.
"""

from typing import Any

from agents.planners.learned import ONE_LIFE, Learned


def _arm(system: str, name: str, **changes: Any) -> Learned:
    return Learned(system=system, name=f"{system}_{name}", changes=ONE_LIFE | changes)


_ALL = (
    _arm("eagle", "coarse", grouper="coarse"),
    _arm("eagle", "metis", grouper="metis"),
    _arm("eagle", "fluid", grouper="fluid"),
    _arm("eagle", "graph", placer="graph"),
    _arm("eagle", "reinforce", algorithm="reinforce"),
    _arm("eagle", "ppo_ce", algorithm="ppo+ce"),
    _arm("mars", "pretrained", pretrain=50),
    _arm("mars", "frozen", pretrain=50, freeze=True),
    _arm("mars", "whole", placer="whole"),
    _arm("mars", "transformer", placer="transformer"),
    _arm("mars", "imitate", imitate=300),
    _arm("mars", "near", start_weight=0.98),
)
ARMS = {arm.name: arm for arm in _ALL}
EAGLE_ARMS = ("eagle", *(name for name in ARMS if name.startswith("eagle")))
MARS_ARMS = ("mars", *(name for name in ARMS if name.startswith("mars")))
