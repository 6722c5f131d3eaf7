"""Mixture of experts: routing, and experts that ranks share."""

from mpipar.layers.expert.cut import ExpertCut
from mpipar.layers.expert.mixture import Mixture
from mpipar.layers.expert.router import Router

__all__ = ["ExpertCut", "Mixture", "Router"]
