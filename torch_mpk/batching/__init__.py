"""Steps of Hugging Face's engine of continuous batching, each of them one launch."""
