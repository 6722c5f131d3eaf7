"""How a dense layer is cut over the tensor-parallel axis."""
