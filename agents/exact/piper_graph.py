"""A Piper problem -> OpGraph, and its plan's stages, for the simulator.

The file has one time per layer, forward and backward together: a third is taken as forward, two
thirds as backward. Only what Placewright's stages can say is converted: no tensor parallelism and
no recomputation of single layers.
"""

from agents.exact.piper import VANILLA, PiperPlan, PiperProblem
from agents.exact.stage_plan import NamedStage
from simcore.errors import GraphError, PlanError
from simcore.frontends.pipedream import decode_profile
from simcore.graph import OpGraph
from simcore.units import MS


def piper_graph(problem: PiperProblem, name: str) -> OpGraph:
    """Returns the graph of a problem without tensor parallelism, for one microbatch.

    Args:
        problem: the problem.
        name: of the graph.

    Raises:
        GraphError: a node has no configuration for one device that keeps activations.
    """
    outputs = {node.id: 0.0 for node in problem.nodes}
    for edge in problem.edges:
        outputs[edge.source_id] = max(outputs[edge.source_id], edge.communication_cost)
    lines = []
    for node in problem.nodes:
        way = next((way for way in node.configs.get("1", []) if way.id == VANILLA), None)
        if way is None:
            raise GraphError(f"{name}: node {node.id} has no {VANILLA!r} configuration at degree 1")
        milliseconds = way.time_per_sample / MS
        lines.append(
            f"node{node.id} -- {node.name or 'layer'} -- "
            f"forward_compute_time={milliseconds / 3!r}, "
            f"backward_compute_time={milliseconds * 2 / 3!r}, "
            f"activation_size={outputs[node.id]:.0f}, parameter_size={way.parameter_size:.0f}"
        )
    lines += [f"\tnode{edge.source_id} -- node{edge.dest_id}" for edge in problem.edges]
    return decode_profile("\n".join(lines), name)


def piper_stages(plan: PiperPlan) -> list[NamedStage]:
    """Returns the stages of a plan under the names of `piper_graph`.

    Raises:
        PlanError: a stage splits tensors or recomputes a layer.
    """
    for number, stage in enumerate(plan.stages):
        if stage.tensor_degree > 1:
            raise PlanError(
                f"stage {number}: tensor parallelism of degree {stage.tensor_degree} cannot be "
                "converted"
            )
        if set(stage.configs) != {VANILLA}:
            raise PlanError(f"stage {number}: recomputation of single layers cannot be converted")
    return [
        NamedStage(tuple(f"node{node}" for node in stage.nodes), stage.replicas)
        for stage in plan.stages
    ]
