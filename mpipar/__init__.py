"""Trains and runs transformers over MPI, with the same numbers in every layout."""
