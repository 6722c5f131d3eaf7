"""Proof that a layout computes what one rank computes."""

from mpipar.verify.run import run_verification

__all__ = ["run_verification"]
