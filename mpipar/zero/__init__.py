"""Flat parameter state, gradient reduction, clipping and AdamW."""
