"""torch_mpk: run a whole model forward as one persistent GPU kernel, through ``torch.compile(model, backend="mpk")``."""
