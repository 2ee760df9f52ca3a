"""How builds run: in the background, timed stage by stage, with readable artefacts, and without a model's effects."""
