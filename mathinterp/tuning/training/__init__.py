"""What fine-tuning leaves in a store."""
