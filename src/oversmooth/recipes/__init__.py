"""Data, models and settings of the published runs, on the Hugging Face Trainer."""
