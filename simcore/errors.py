"""The errors a user can meet: one line each, naming the file, op, device or key and the reason."""


class PlacewrightError(Exception):
    """Base of every error that is the input's fault; command lines print it without a traceback."""


class UsageError(PlacewrightError):
    """A command line that cannot be understood or that contradicts itself (exit status 2)."""


class GraphError(PlacewrightError):
    """A graph that is malformed: cycle, missing op, negative cost, unreadable file."""


class JobError(PlacewrightError):
    """A job that the graph cannot run: another batch, another precision."""


class ClusterError(PlacewrightError):
    """A cluster file or preset that is malformed or unknown."""


class ProfileError(PlacewrightError):
    """A hardware profile that is malformed or missing."""


class PlanError(PlacewrightError):
    """A plan that does not belong to its graph, job or cluster, or that breaks a rule.

    Attributes:
        grid: lines of a time x rank picture with a mark at the culprit, of a schedule; else empty.
    """

    def __init__(self, *args: object, grid: tuple[str, ...] = ()) -> None:
        super().__init__(*args)
        self.grid = grid


class DeadlockError(PlanError):
    """A plan whose tasks wait for each other."""


class CaptureError(PlacewrightError):
    """A model that cannot be captured as a graph."""


class InfeasibleError(PlacewrightError):
    """No plan fits the devices under the given constraints."""


class MeasurementError(PlacewrightError):
    """A file of measurements, or a trace, that is malformed."""


class RunError(PlacewrightError):
    """A plan that cannot be run for real, or a run that failed; names the rank and its action."""
