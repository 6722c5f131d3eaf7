"""The training loop: steps, evaluation, metrics, checkpoints, and ending cleanly."""

from mpipar.train.run import run_training

__all__ = ["run_training"]
