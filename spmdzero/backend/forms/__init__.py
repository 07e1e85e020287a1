"""Forms that tensors take: as stored, in a tree, over a border, in the graph of autograd."""
