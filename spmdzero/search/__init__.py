"""Searches for the JSON with which a model trains fastest on a slice, ahead of time."""

from spmdzero.search._knobs import Candidate
from spmdzero.search._plan_for import PROGRAMS, plan_for
from spmdzero.search._result import TrainingPlan, Way

__all__ = ["PROGRAMS", "Candidate", "TrainingPlan", "Way", "plan_for"]
