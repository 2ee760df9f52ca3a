"""Models that several processes share: each rank's part of a graph, and what the ranks agree on."""
