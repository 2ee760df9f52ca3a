"""What the commands of ``python -m torch_mpk`` do, where it is theirs alone."""
