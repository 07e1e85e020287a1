"""Forms of tensors: as stored, in a tree, across a border, in autograd's graph."""
