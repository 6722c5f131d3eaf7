"""Fused passes over arrays on the CPU, compiled by Numba."""
