"""Pipeline parallelism: cuts a model into stages and runs them by a schedule. See README.md."""

from hf_dist.parallel.pipeline.actions import Schedule
from hf_dist.parallel.pipeline.communication import add_communication
from hf_dist.parallel.pipeline.p2p import P2PTransport, make_channels
from hf_dist.parallel.pipeline.partition import BlockCosts, Partition, partition
from hf_dist.parallel.pipeline.planned_split import PlannedSplit, plan_stages
from hf_dist.parallel.pipeline.probe import Probe, probe
from hf_dist.parallel.pipeline.runtime import Hooks, ScheduleRun
from hf_dist.parallel.pipeline.schedule import SCHEDULES, forward_only, make_schedule
from hf_dist.parallel.pipeline.simulate import simulate, validate
from hf_dist.parallel.pipeline.split import StagedModel
from hf_dist.parallel.pipeline.stage_plan import StagePlan, make_plan
from hf_dist.parallel.pipeline.verify import verify

__all__ = [
    "SCHEDULES",
    "BlockCosts",
    "Hooks",
    "P2PTransport",
    "Partition",
    "PlannedSplit",
    "Probe",
    "Schedule",
    "ScheduleRun",
    "StagePlan",
    "StagedModel",
    "add_communication",
    "forward_only",
    "make_channels",
    "make_plan",
    "make_schedule",
    "partition",
    "plan_stages",
    "probe",
    "simulate",
    "validate",
    "verify",
]
