"""Schedules as data, and the executor that runs them."""
