"""The tests. Modules that tests share are imported as ``tests.<stage>.<module>``."""
