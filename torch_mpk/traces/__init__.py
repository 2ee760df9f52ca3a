"""What Dynamo found, kept for other engines, model objects and processes."""
