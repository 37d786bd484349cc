"""Models and data sets by their name on the Hugging Face hub."""
