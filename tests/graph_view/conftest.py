"""The schedule tests' graph of a decoder is what these tests look at."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
