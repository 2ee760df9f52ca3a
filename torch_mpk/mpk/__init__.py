"""The place where programs written for Mirage look for the layer-by-layer API."""
