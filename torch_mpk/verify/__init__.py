"""``options={"verify": ...}``: calls compared with eager, and users' tasks in guarded memory."""
