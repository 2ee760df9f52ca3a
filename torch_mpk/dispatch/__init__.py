"""Which build serves a call: what is declined, what shares a build, what falls back, and what was built before."""
