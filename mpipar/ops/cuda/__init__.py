"""CUDA kernels of everything between matrix products, and the ops that launch them."""
