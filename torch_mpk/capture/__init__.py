"""Stage 1: from Dynamo's graph and its inputs, of whatever class, to a graph of ATen operations on plain tensors."""
