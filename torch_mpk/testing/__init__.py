"""What tests, benchmarks and examples share. Nothing in torch_mpk imports it."""
