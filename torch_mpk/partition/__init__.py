"""Stage 3: from a graph to segments, each ours or PyTorch's, and what either is estimated to cost."""
