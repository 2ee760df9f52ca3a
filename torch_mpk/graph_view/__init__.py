"""``python -m torch_mpk graph``: task graphs and schedules that a build left as JSON, in words and as pictures."""

from torch_mpk.graph_view.drawing import to_dot, to_html, to_svg
from torch_mpk.graph_view.reader import GraphFile, read
from torch_mpk.graph_view.text import critical_path, event, summary, task

__all__ = ["GraphFile", "critical_path", "event", "read", "summary", "task", "to_dot", "to_html", "to_svg"]
