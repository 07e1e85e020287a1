"""Tensors whose operations are recorded: what torch, a script and autograd ask of them."""
