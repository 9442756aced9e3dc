"""Tensors as such: containers of them, slices, tensors without memory, streams of random numbers, sums of bits."""
