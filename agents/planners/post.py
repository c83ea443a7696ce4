"""Post: cross-entropy fits with steps of the PPO objective between them, from nothing known.

Gao, Chen and Li, NeurIPS 2018. Known: one categorical per group and no network, parameters that
begin equal, about ten steps of the PPO objective after every K samples, a closed-form fit to the
best tenth after every N, mixed with the uniform distribution. Ours: K = 32, N = 320, the share of
the uniform, the number of groups, and lives that begin again where nothing better comes.
"""

from agents.planners.cross_entropy import CrossEntropy


def post() -> CrossEntropy:
    """Returns Post with our constants."""
    return CrossEntropy(
        levels=(128,),
        samples=32,
        elite=0.1,
        step=1.0,
        start_weight=0.0,
        patience=60,
        lives=1000,
        ascents=9,
        name="post",
    )
