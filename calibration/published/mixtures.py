"""Experts of Megatron-LM's tests: what their rows say, and what only the tests' own files say.

Widths of experts, shared experts and grouped products are in the files ``model_config.yaml`` of the
tests. Devices that share experts are taken as follows: a device holds its share of them whole where
the row has as many experts a device as tensor-parallel devices, or the share of each that its
tensor-parallel group has; its products are as large either way. Gradients of experts are summed
over all copies, as those of the other parameters are, while in the tests fewer devices have the
same expert: some milliseconds less. Tokens are spread evenly, and sending them takes less on
NVLink than the host needs to start it. The host's seconds of an op are those of a module with its
gradients; the plain operations that choose and sort, which have none, take what a launch takes.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from calibration.published.models import GPTSize, MixtureSize
from calibration.published.rows import Run
from simcore.cost import CostTable
from simcore.graph import OpGraph

_PLAIN = (".router.sinkhorn.", ".router.order.", ".turn.plain.")  # modules whose ops are plain


class _Stated(NamedTuple):
    """What a test's own file states of its experts."""

    pattern: str  # of the test's name
    inner: int = 0  # width inside an expert; 0 = 4 times that of the model
    shared: int = 0  # likewise of the expert for all tokens; 0 = none
    is_grouped: bool = False


_TESTS = (
    _Stated("_ep8_resume", inner=1024, is_grouped=True),
    _Stated("_tp4_ep2_etp2_pp2_resume", inner=1024, shared=512, is_grouped=True),
    _Stated("_8experts_etp1_ep4", is_grouped=True),
    _Stated("experts2parallel"),
)
_NOT_MODELLED = {  # what of a test is not -> reason
    "fp8": "products in 8 bits",
    "muon": "optimizer Muon",
    "offloading": "activations offloaded",
    "groupedGEMM_op_fuser": "fused experts with gates",
    "memory_speed": "experts with gates, and several tokens predicted",
}


def lacking(run: Run, stated: Mapping[str, Any]) -> str:
    """Returns why nothing can be made of a row with experts, "" if something can."""
    if "num-experts" not in stated:
        return "expert parallel" if run.ep > 1 else ""
    words = run.model + ("fp8" if "fp8-format" in stated else "")
    count, choices = (_whole(stated.get(key)) for key in ("num-experts", "moe-router-topk"))
    reasons = {reason: word in words for word, reason in _NOT_MODELLED.items()} | {
        "number of experts not stated": min(count, choices) < 1,
        "experts do not divide among devices": count % max(1, run.ep) > 0 or choices > count,
        "width of experts not stated": _test(run) is None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _whole(text: object) -> int:
    return int(str(text)) if re.fullmatch(r"\d{1,6}", str(text)) else 0


def mixture_size(run: Run, size: GPTSize, stated: Mapping[str, Any]) -> MixtureSize:
    """Returns the sizes of what one device has of a model with experts.

    Args:
        run: a row that lacks nothing.
        size: of its model without experts.
        stated: arguments of the row.
    """
    test = _test(run) or _Stated("")
    count = int(stated["num-experts"])
    fields = {name: getattr(size, name) for name in GPTSize.__slots__ if name != "file"}
    return MixtureSize(
        **fields,
        count=count,
        local=count // max(1, run.ep),
        choices=int(stated["moe-router-topk"]),
        inner=test.inner or 4 * size.width,
        shared=test.shared,
        is_grouped=test.is_grouped,
    )


def with_plain_ops(cost: CostTable, plain: CostTable, graph: OpGraph) -> CostTable:
    """Returns costs in which ops that no module and no autograd wraps take but a launch.

    Args:
        cost: with the host's time of each op.
        plain: without.
        graph: what one device does.
    """
    named = np.array([any(part in name for part in _PLAIN) for name in graph.op_names])
    launched = np.maximum(plain.seconds, plain.launch[:, :, None])
    return replace(cost, seconds=np.where(named[:, None, None], launched, cost.seconds))


def _test(run: Run) -> _Stated | None:
    return next((test for test in _TESTS if test.pattern in run.model), None)
