"""What ``torch_mpk.generate`` is called with, its caches, its drafts and its choice of tokens."""
