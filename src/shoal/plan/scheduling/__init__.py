"""How many workers every job of a cluster gets, on which nodes, and why. Nothing here does I/O.

`SchedulingPolicy.decide(now, jobs, nodes, current)` is called on events (a job arrives or ends, a node comes or goes, a
speed was measured) or in rounds. It is the same object for the real cluster and for the simulator.
"""

from shoal.plan.scheduling.decision import Decision
from shoal.plan.scheduling.measured_speed import MeasuredSpeed
from shoal.plan.scheduling.policy import SchedulingPolicy
from shoal.plan.scheduling.views import Allocation, JobView, NodeView, SpeedCurve
from shoal.plan.scheduling.weights import Weighting

__all__ = [
    "Allocation",
    "Decision",
    "JobView",
    "MeasuredSpeed",
    "NodeView",
    "SchedulingPolicy",
    "SpeedCurve",
    "Weighting",
]
